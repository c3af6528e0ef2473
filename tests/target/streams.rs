//! Deep queues of large transfers, cut at odd places.

use super::client::*;

const WRITES: u64 = 128;
const LEN: usize = 256 << 10;

/// Writes all of a queue's blocks: answers each R2T as it comes, in pieces of any size.
fn write_all(io: &mut Wire, queue: u64, seed: u32) {
    let mut cids = std::collections::HashMap::new();
    for i in 0..WRITES {
        let sqe = Sqe::rw(1, 1, (queue * WRITES + i) * 64, 63).sgl(TRANSPORT, LEN as u32);
        cids.insert(io.submit(sqe, &[]), i);
    }
    let mut random = seed | 1;
    let mut completed = 0;
    while completed < WRITES {
        let pdu = io.receive().expect("the connection is open");
        if pdu.kind() == 5 {
            assert!(pdu.completion(Vec::new()).ok());
            completed += 1;
            continue;
        }
        assert_eq!(pdu.kind(), 9);
        let (cid, ttag, offset, len) = (pdu.u16(8), pdu.u16(10), pdu.u32(12) as usize, pdu.u32(16) as usize);
        let data = pattern(LEN, (queue * WRITES + cids[&cid]) as u8);
        let half = offset + len / 2;
        let mut stream = io.h2c_data(cid, ttag, offset as u32, &data[offset..half], false);
        stream.extend(io.h2c_data(cid, ttag, half as u32, &data[half..offset + len], true));
        let mut rest = &stream[..];
        // Small pieces first, where headers and digests are cut; then the bulk.
        for _ in 0..40 {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let piece = (1 + random as usize % 1448).min(rest.len());
            io.send(&rest[..piece]);
            rest = &rest[piece..];
        }
        io.send(rest);
    }
}

#[test]
fn deep_queues_of_large_writes_stay_in_step_however_they_are_cut() {
    let rig = Rig::start();
    for (round, (hpda, dgst)) in [(0, 0), (0, 3), (7, 1), (7, 2)].into_iter().enumerate() {
        let admin = rig.admin();
        std::thread::scope(|scope| {
            for queue in 0..2 {
                let (rig, admin) = (&rig, &admin);
                scope.spawn(move || {
                    let mut io = Wire::open(rig.addr);
                    io.handshake_with(hpda, dgst);
                    io.connect_io(admin, HOSTNQN, queue as u16 + 1, 128).expect_ok();
                    write_all(&mut io, queue, 77 + queue as u32 + round as u32);
                    for i in 0..WRITES {
                        let got = io.read(1, (queue * WRITES + i) * 64, LEN as u32).expect_ok();
                        assert!(
                            got == pattern(LEN, (queue * WRITES + i) as u8),
                            "HPDA {hpda} DGST {dgst} {i}"
                        );
                    }
                });
            }
        });
    }
    rig.check_health();
}

#[test]
fn host_data_beyond_what_one_pdu_may_carry_ends_the_connection() {
    let rig = Rig::build("ram:64MiB", |target| {
        let options = rimrock::target::TransportOptions { max_h2c_data: 8192, ..target.transport() };
        target.set_transport(options).unwrap();
    });
    let (_admin, mut io) = rig.connect();
    assert_eq!(io.maxh2cdata, 8192);
    let data = pattern(65536, 3);
    let sqe = Sqe::rw(1, 1, 0, 15).sgl(TRANSPORT, 65536);
    for step in [8192, 4096] {
        io.submit(sqe, &[]);
        let r2t = io.expect(9);
        io.send_host_data(r2t.u16(8), r2t.u16(10), 0, &data, step);
        assert!(io.complete(&[]).ok());
        assert_eq!(io.read(1, 0, 65536).expect_ok(), data);
    }
    io.submit(sqe, &[]);
    let r2t = io.expect(9);
    let pdu = io.h2c_data(r2t.u16(8), r2t.u16(10), 0, &data[..8196], false);
    io.send(&pdu);
    assert_eq!(io.expect_terminated().0, 5, "data transfer limit exceeded");
    rig.check_health();
}

#[test]
fn data_pdus_without_data_carry_no_digest_and_change_nothing() {
    let rig = Rig::start();
    let admin = rig.admin();
    let mut io = Wire::open(rig.addr);
    io.handshake_with(0, 3);
    io.connect_io(&admin, HOSTNQN, 1, 128).expect_ok();
    let data = pattern(16384, 4);
    io.submit(Sqe::rw(1, 1, 0, 3).sgl(TRANSPORT, 16384), &[]);
    let r2t = io.expect(9);
    let (cid, ttag) = (r2t.u16(8), r2t.u16(10));
    let empty = io.h2c_data(cid, ttag, 0, &[], false);
    io.send(&empty);
    io.send_host_data(cid, ttag, 0, &data, 4096);
    assert!(io.complete(&[]).ok());
    assert_eq!(io.read(1, 0, 16384).expect_ok(), data);
}

#[test]
fn hosts_that_leave_with_admin_capsules_pending_leave_nothing_behind() {
    let rig = Rig::build("ram:64MiB", |target| {
        let options = rimrock::target::TransportOptions { in_capsule_data_size: 0, ..target.transport() };
        target.set_transport(options).unwrap();
    });
    for round in 0..20 {
        let (mut admin, mut io) = rig.connect();
        assert_eq!(admin.identify(1, 0).expect_ok()[1792..1796], [4, 0, 0, 0], "IOCCSZ");
        for _ in 0..30 {
            admin.submit(Sqe::new(IDENTIFY, 0).dword(10, 1).sgl(TRANSPORT, 4096), &[]);
        }
        // Half a capsule with data behind them.
        let capsule = admin.pdu(4, 0, &Sqe::fabrics(4).sgl(IN_CAPSULE, 8192).0, &[1; 8192]);
        admin.send(&capsule[..5000]);
        if round % 2 == 0 {
            admin.reset();
        }
        drop(admin);
        while io.receive().is_some() {}
    }
    rig.await_connections(0);
    rig.check_health();
}
