//! PDUs: the handshake, headers, digests, transfer tags, and streams cut anywhere.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::client::*;

/// Fatal Error Status values.
const HEADER_FIELD: u16 = 1;
const SEQUENCE: u16 = 2;
const HEADER_DIGEST: u16 = 3;
const OUT_OF_RANGE: u16 = 4;
const LIMIT: u16 = 5;

/// A write of `len` bytes whose data is to be asked for; returns CID and TTAG.
fn open_transfer(io: &mut Wire, slba: u64, len: usize) -> (u16, u16) {
    let sqe = Sqe::rw(1, 1, slba, (len / 4096) as u32 - 1).sgl(TRANSPORT, len as u32);
    let cid = io.submit(sqe, &[]);
    let r2t = io.expect(9);
    assert_eq!((r2t.u16(8), r2t.u32(12), r2t.u32(16)), (cid, 0, len as u32));
    (cid, r2t.u16(10))
}

#[test]
fn connect_data_that_is_asked_for_is_served() {
    let rig = Rig::start();
    let mut wire = rig.wire();
    let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
    let cid = wire.submit(Wire::connect_sqe(0, 32, 0).sgl(TRANSPORT, 1024), &[]);
    let completion = wire.complete(&data);
    assert!(completion.ok() && completion.cid == cid && (1..=0xFFEF).contains(&completion.result));
    wire.enable();
    rig.check_health();
}

#[test]
fn data_that_nobody_asked_for_ends_the_connection() {
    let rig = Rig::start();
    let check = |name: &str, send: &dyn Fn(&mut Wire)| {
        let (_admin, mut io) = rig.connect();
        send(&mut io);
        assert_eq!(io.expect_terminated(), (HEADER_FIELD, 10), "{name}");
        rig.check_health();
    };
    for ttag in [0, 0xFFFF, 1, 0x0801] {
        check("a tag that was never issued", &|io| {
            let pdu = io.h2c_data(1, ttag, 0, &[0; 512], true);
            io.send(&pdu);
        });
    }
    check("a tag that is done with", &|io| {
        let (cid, ttag) = open_transfer(io, 0, 16384);
        io.send_host_data(cid, ttag, 0, &pattern(16384, 1), 16384);
        assert!(io.complete(&[]).ok());
        let pdu = io.h2c_data(cid, ttag, 0, &[0; 4096], false);
        io.send(&pdu);
    });
    check("another command's tag", &|io| {
        let (cid, ttag) = open_transfer(io, 0, 16384);
        let pdu = io.h2c_data(cid.wrapping_add(1), ttag, 0, &[0; 4096], false);
        io.send(&pdu);
    });
    check("data for a read", &|io| {
        let cid = io.submit(Sqe::rw(2, 1, 0, 0).sgl(TRANSPORT, 4096), &[]);
        assert!(io.complete(&[]).ok());
        let pdu = io.h2c_data(cid, 0x0800, 0, &[0; 4096], true);
        io.send(&pdu);
    });
}

#[test]
fn data_beyond_what_was_asked_for_ends_the_connection() {
    let rig = Rig::start();
    type Send = fn(&mut Wire, u16, u16);
    let cases: [(&str, u16, Send); 5] = [
        ("skips bytes", OUT_OF_RANGE, |io, cid, ttag| {
            let pdu = io.h2c_data(cid, ttag, 4096, &[0; 4096], false);
            io.send(&pdu);
        }),
        ("goes on behind the end", OUT_OF_RANGE, |io, cid, ttag| {
            let pdu = io.h2c_data(cid, ttag, 0, &[0; 20480], true);
            io.send(&pdu);
        }),
        ("offset of nearly 4 GiB", OUT_OF_RANGE, |io, cid, ttag| {
            let pdu = io.h2c_data(cid, ttag, 0xFFFF_F000, &[0; 8192], true);
            io.send(&pdu);
        }),
        ("last before the end", HEADER_FIELD, |io, cid, ttag| {
            let pdu = io.h2c_data(cid, ttag, 0, &[0; 4096], true);
            io.send(&pdu);
        }),
        ("DATAL is not what PLEN says", HEADER_FIELD, |io, cid, ttag| {
            let mut pdu = io.h2c_data(cid, ttag, 0, &[0; 4096], false);
            pdu[16..20].copy_from_slice(&2048u32.to_le_bytes());
            io.send(&pdu);
        }),
    ];
    for (name, fes, send) in cases {
        let (_admin, mut io) = rig.connect();
        let (cid, ttag) = open_transfer(&mut io, 0, 16384);
        send(&mut io, cid, ttag);
        assert_eq!(io.expect_terminated().0, fes, "{name}");
        rig.check_health();
    }
}

#[test]
fn every_legal_split_of_host_data_lands_where_it_belongs() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    assert!(io.maxh2cdata >= 4096 && io.maxh2cdata % 4 == 0);
    let data = pattern(256 * 1024, 7);
    for step in [io.maxh2cdata as usize, 4096, 65536, 4, 1020] {
        let (cid, ttag) = open_transfer(&mut io, 16, data.len());
        io.send_host_data(cid, ttag, 0, &data, step);
        assert!(io.complete(&[]).ok(), "in steps of {step}");
        assert_eq!(io.read(1, 16, data.len() as u32).expect_ok(), data);
        assert!(io.write(1, 16, &vec![0; data.len()]).ok());
    }
}

#[test]
fn a_stream_in_tiny_pieces_and_two_queues_at_once_stay_in_step() {
    for (hpda, dgst) in [(0, 0), (0, 1), (0, 2), (7, 3), (31, 0), (31, 3)] {
        let rig = Rig::start();
        let admin = rig.admin();
        let mut queues: Vec<Wire> = (1..=2)
            .map(|qid| {
                let mut io = Wire::open(rig.addr);
                io.handshake_with(hpda, dgst);
                io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
                io
            })
            .collect();
        let size = 64 * 1024;
        // All commands first, then all data in whatever order the R2Ts come, cut at odd places.
        for (q, io) in queues.iter_mut().enumerate() {
            for i in 0..32u64 {
                let sqe = Sqe::rw(1, 1, (q as u64 * 32 + i) * 16, 15).sgl(TRANSPORT, size);
                io.submit(sqe, &[]);
            }
        }
        for (q, io) in queues.iter_mut().enumerate() {
            let first = io.expect(9);
            let base = first.u16(8);
            let mut r2ts = vec![first];
            r2ts.extend((1..32).map(|_| io.expect(9)));
            let mut stream = Vec::new();
            for r2t in &r2ts {
                let (cid, ttag) = (r2t.u16(8), r2t.u16(10));
                let data = pattern(size as usize, (q * 32) as u8 + (cid - base) as u8);
                stream.extend(io.h2c_data(cid, ttag, 0, &data[..1000], false));
                stream.extend(io.h2c_data(cid, ttag, 1000, &data[1000..], true));
            }
            let mut at = 0;
            let mut step = 1;
            while at < stream.len() {
                let len = step.min(stream.len() - at);
                io.send(&stream[at..at + len]);
                at += len;
                step = step * 7 % 1447 + 1;
                if at > 40_000 {
                    step *= 64;
                }
            }
            for _ in 0..32 {
                assert!(io.complete(&[]).ok());
            }
            for i in 0..32u64 {
                let got = io.read(1, (q as u64 * 32 + i) * 16, size).expect_ok();
                assert_eq!(
                    got,
                    pattern(size as usize, (q as u64 * 32 + i) as u8),
                    "HPDA {hpda} DGST {dgst} {i}"
                );
            }
        }
    }
}

#[test]
fn a_wrong_handshake_ends_the_connection_and_reserved_bytes_do_not() {
    let rig = Rig::start();
    let mut reserved = Wire::ic_req(0, 0);
    reserved[16..128].fill(0xAA);
    let mut wire = Wire::open(rig.addr);
    wire.send(&reserved);
    wire.expect(1);

    let wrong = |change: fn(&mut Vec<u8>)| {
        let mut pdu = Wire::ic_req(0, 0);
        change(&mut pdu);
        let mut wire = Wire::open(rig.addr);
        wire.send(&pdu);
        wire.expect_terminated()
    };
    assert_eq!(wrong(|pdu| pdu[8] = 1), (HEADER_FIELD, 8), "PFV 1");
    assert_eq!(wrong(|pdu| pdu[10] = 32), (HEADER_FIELD, 10), "HPDA 32");
    assert_eq!(wrong(|pdu| pdu[11] = 0xFF), (HEADER_FIELD, 11), "DGST FFh");
    assert_eq!(wrong(|pdu| pdu[2] = 127), (HEADER_FIELD, 2), "HLEN");
    assert_eq!(wrong(|pdu| pdu[4] = 129), (HEADER_FIELD, 4), "PLEN");

    // A second ICReq, one after Connect, a command and data before any.
    let mut wire = rig.wire();
    wire.send(&Wire::ic_req(0, 0));
    assert_eq!(wire.expect_terminated().0, SEQUENCE);
    let mut admin = rig.admin();
    admin.send(&Wire::ic_req(0, 0));
    assert_eq!(admin.expect_terminated().0, SEQUENCE);
    let mut wire = Wire::open(rig.addr);
    wire.submit(Sqe::fabrics(4), &[]);
    assert_eq!(wire.expect_terminated().0, SEQUENCE);
    let mut wire = Wire::open(rig.addr);
    let pdu = wire.h2c_data(0, 0, 0, &[0; 8], true);
    wire.send(&pdu);
    assert_eq!(wire.expect_terminated().0, SEQUENCE);
    rig.check_health();
}

#[test]
fn pdu_types_that_hosts_do_not_send_end_the_connection_in_every_state() {
    let rig = Rig::start();
    for kind in [1, 3, 5, 7, 8, 9, 10, 0x7F, 0xFF] {
        let pdu = [kind, 0, 24, 0, 24, 0, 0, 0].into_iter().chain([0; 16]).collect::<Vec<u8>>();
        let mut before = Wire::open(rig.addr);
        before.send(&pdu);
        assert_eq!(before.expect_terminated(), (HEADER_FIELD, 0), "{kind} before the handshake");
        let mut after = rig.wire();
        after.send(&pdu);
        assert_eq!(after.expect_terminated(), (HEADER_FIELD, 0), "{kind} before Connect");
        let (_admin, mut io) = rig.connect();
        io.send(&pdu);
        assert_eq!(io.expect_terminated(), (HEADER_FIELD, 0), "{kind} on a queue");
    }
    rig.check_health();
}

#[test]
fn wrong_capsule_headers_end_the_connection() {
    let rig = Rig::start();
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, u32, Change); 7] = [
        ("HLEN", 2, |pdu| pdu[2] = 71),
        ("PLEN below the header", 4, |pdu| pdu[4..8].copy_from_slice(&71u32.to_le_bytes())),
        ("PLEN of 4 GiB", 4, |pdu| pdu[4..8].copy_from_slice(&u32::MAX.to_le_bytes())),
        ("PDO inside the header", 3, |pdu| pdu[3] = 64),
        ("PDO not aligned", 3, |pdu| pdu[3] = 73),
        ("PDO at the end", 4, |pdu| {
            pdu[3] = 72 + 128;
            pdu[4..8].copy_from_slice(&200u32.to_le_bytes());
        }),
        ("a digest that was not agreed", 1, |pdu| pdu[1] = 1),
    ];
    for (name, fei, change) in cases {
        let (_admin, mut io) = rig.connect();
        let mut pdu = io.pdu(4, 0, &Sqe::rw(1, 1, 0, 0).sgl(IN_CAPSULE, 4096).0, &[0; 4096]);
        change(&mut pdu);
        io.send(&pdu);
        assert_eq!(io.expect_terminated(), (HEADER_FIELD, fei), "{name}");
    }
    rig.check_health();
}

#[test]
fn the_in_capsule_limit_is_the_one_that_identify_reports() {
    let rig = Rig::build("ram:64MiB", |target| {
        let options = rimrock::target::TransportOptions { in_capsule_data_size: 0, ..target.transport() };
        target.set_transport(options).unwrap();
    });
    let mut admin = rig.admin();
    let id = admin.identify(1, 0).expect_ok();
    assert_eq!(u32::from_le_bytes(id[1792..1796].try_into().unwrap()), 4, "IOCCSZ");
    // Admin capsules may carry 8192 bytes whatever that says.
    let flush = admin.command(Sqe::new(0x18, 0).sgl(IN_CAPSULE, 8192), &[0; 8192]);
    assert!(flush.ok(), "keep alive with data nobody needs");
    let mut io = rig.wire();
    io.connect_io(&admin, HOSTNQN, 1, 32).expect_ok();
    let data = pattern(4096, 3);
    let cid = io.submit(Sqe::rw(1, 1, 0, 0).sgl(TRANSPORT, 4096), &[]);
    let completion = io.complete(&data);
    assert!(completion.ok() && completion.cid == cid);
    io.submit(Sqe::rw(1, 1, 0, 0).sgl(IN_CAPSULE, 4096), &data);
    assert_eq!(io.expect_terminated().0, LIMIT);

    // Above 8192 bytes nothing fits anywhere.
    let mut wire = rig.wire();
    wire.submit(Sqe::fabrics(1).sgl(IN_CAPSULE, 12288), &[0; 12288]);
    assert_eq!(wire.expect_terminated(), (HEADER_FIELD, 4));
    rig.check_health();
}

fn digest_queue(rig: &Rig, admin: &Wire, dgst: u8) -> Wire {
    let mut io = Wire::open(rig.addr);
    io.handshake_with(0, dgst);
    io.connect_io(admin, HOSTNQN, 1, 128).expect_ok();
    io
}

#[test]
fn a_data_digest_error_fails_the_command_and_nothing_else() {
    let rig = Rig::start();
    let admin = rig.admin();
    let mut io = digest_queue(&rig, &admin, 3);
    let before = pattern(16384, 1);
    assert!(io.write(1, 0, &before).ok());
    for flip_digest in [false, true] {
        let (cid, ttag) = open_transfer(&mut io, 0, 16384);
        let mut pdu = io.h2c_data(cid, ttag, 0, &pattern(16384, 2), true);
        let at = if flip_digest { pdu.len() - 1 } else { pdu.len() - 100 };
        pdu[at] ^= 0x10;
        io.send(&pdu);
        let completion = io.complete(&[]);
        assert_eq!(completion.code(), 0x022, "transient transport error");
        assert_eq!(io.read(1, 0, 16384).expect_ok(), before, "the medium is unchanged");
    }
    // The same in a capsule.
    let cid = io.next_cid();
    let mut pdu = io.pdu(4, 0, &Sqe::rw(1, 1, 0, 0).sgl(IN_CAPSULE, 4096).cid(cid).0, &[9; 4096]);
    let at = pdu.len() - 5;
    pdu[at] ^= 1;
    io.send(&pdu);
    assert_eq!(io.complete(&[]).code(), 0x022);
    assert_eq!(io.read(1, 0, 16384).expect_ok(), before);
    // A header digest error ends the connection.
    let mut pdu = io.pdu(4, 0, &Sqe::rw(2, 1, 0, 0).sgl(TRANSPORT, 4096).0, &[]);
    pdu[50] ^= 1;
    io.send(&pdu);
    assert_eq!(io.expect_terminated().0, HEADER_DIGEST);
    rig.check_health();
}

#[test]
fn closing_with_digested_reads_in_flight_harms_nobody() {
    let rig = Rig::start();
    for _ in 0..10 {
        let admin = rig.admin();
        let mut io = digest_queue(&rig, &admin, 3);
        for i in 0..64 {
            io.submit(Sqe::rw(2, 1, i * 32, 31).sgl(TRANSPORT, 131_072), &[]);
        }
        drop(io);
    }
    rig.await_connections(0);
    rig.check_health();
}

#[test]
fn read_data_is_contiguous_and_completes_as_flow_control_asks() {
    use rimrock::target::{C2hSuccess, TransportOptions};
    for (mode, disable, expect_success) in [
        (C2hSuccess::Auto, false, false),
        (C2hSuccess::Auto, true, true),
        (C2hSuccess::Off, true, false),
        (C2hSuccess::Always, false, true),
    ] {
        let rig = Rig::build("ram:64MiB", |target| {
            target.set_transport(TransportOptions { c2h_success: mode, ..target.transport() }).unwrap();
        });
        let admin = rig.admin();
        let mut io = rig.wire();
        let data = Wire::connect_data(admin.cntlid, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
        // CATTR is byte 46: bit 2 switches SQ flow control off.
        let connect = Wire::connect_sqe(1, 8, 0).dword(11, 7 | if disable { 4 << 16 } else { 0 });
        let connected = io.command(connect, &data);
        assert_eq!(connected.sqhd, if disable { 0xFFFF } else { 1 });
        let mut heads = Vec::new();
        for _ in 0..10 {
            io.submit(Sqe::rw(2, 1, 0, 31).sgl(TRANSPORT, 131_072), &[]);
            let mut got = 0;
            loop {
                let pdu = io.expect(7);
                assert_eq!(pdu.u32(12) as usize, got);
                got += pdu.data().len();
                assert_eq!(pdu.flags() & 4 != 0, got == 131_072, "LAST_PDU on the last and only there");
                assert_eq!(pdu.flags() & 8 != 0, expect_success && got == 131_072, "SUCCESS");
                if got == 131_072 {
                    break;
                }
            }
            if !expect_success {
                let completion = io.expect(5).completion(Vec::new());
                assert!(completion.ok());
                heads.push(completion.sqhd);
            }
        }
        if !disable && !expect_success {
            assert_eq!(heads, [2, 3, 4, 5, 6, 7, 0, 1, 2, 3], "SQHD moves with each command and wraps");
        }
    }
}

#[test]
fn scanners_that_send_junk_and_vanish_leave_nothing_behind() {
    let rig = Rig::start();
    let mut seed = 0x1234_5678_9ABC_DEF0u64;
    for i in 0..300 {
        let junk: Vec<u8> = (0..128)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 56) as u8
            })
            .collect();
        let mut wire = Wire::open(rig.addr);
        let _ = wire.stream.write_all(&junk);
        let _ = wire.stream.shutdown(if i % 2 == 0 { Shutdown::Read } else { Shutdown::Both });
    }
    rig.await_connections(0);
    rig.check_health();
}

#[test]
fn hosts_that_leave_in_the_middle_of_anything_leave_nothing_behind() {
    let rig = Rig::start();
    for round in 0..100 {
        let mut wire = Wire::open(rig.addr);
        let ic_req = Wire::ic_req(0, 0);
        wire.send(&ic_req[..if round % 3 == 0 { 64 } else { 128 }]);
        if round % 3 == 2 {
            let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
            wire.submit(Wire::connect_sqe(0, 32, 0), &data[..512 + round]);
        }
    }
    rig.await_connections(0);
    // A handshake in two halves is slow, not wrong.
    let mut wire = Wire::open(rig.addr);
    let ic_req = Wire::ic_req(0, 0);
    wire.send(&ic_req[..50]);
    std::thread::sleep(Duration::from_millis(300));
    wire.send(&ic_req[50..]);
    wire.expect(1);
    rig.check_health();
}

#[test]
fn a_host_that_reports_our_error_is_let_go() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let mut pdu = vec![2, 0, 24, 0, 32, 0, 0, 0, 1, 0];
    pdu.resize(32, 0);
    io.send(&pdu);
    assert!(io.is_closed());
    rig.check_health();
}

#[test]
fn random_bytes_in_every_state_never_harm_another_connection() {
    let seed = std::env::var("RIMROCK_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0xC0FF_EE00u64);
    println!("RIMROCK_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let rig = Rig::start();
    let (_admin, mut witness) = rig.connect_as(OTHER_HOST, 32);
    for round in 0..200u64 {
        let mut wire = Wire::open(rig.addr);
        wire.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        if round % 4 > 0 {
            wire.send(&Wire::ic_req(0, (round % 4) as u8));
        }
        if round % 4 > 1 {
            let data = Wire::connect_data(0xFFFF, SUBNQN.as_bytes(), HOSTNQN.as_bytes(), HOSTID);
            wire.submit(Wire::connect_sqe(0, 32, 0), &data);
        }
        // Mostly PDUs with a right type and a wrong rest, for those get furthest.
        let mut bytes = Vec::new();
        for _ in 0..random() % 8 + 1 {
            let mut pdu = vec![[4u8, 6, 0, 2][(random() % 4) as usize], 0, 0, 0, 0, 0, 0, 0];
            pdu[2] = [72, 24, 128, 24][(random() % 4) as usize];
            pdu[3] = [0, 72, 24, 128][(random() % 4) as usize];
            let len = [72, 128, 24, 4168][(random() % 4) as usize] as usize;
            pdu[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            pdu.resize_with(len, || random() as u8);
            if random() % 3 == 0 {
                pdu.truncate((random() % len as u64) as usize);
            }
            bytes.extend(pdu);
        }
        let _ = wire.stream.write_all(&bytes);
        let _ = wire.stream.read(&mut [0; 4096]);
        if round % 20 == 0 {
            let data = pattern(4096, round as u8);
            assert!(witness.write(1, round, &data).ok());
            assert_eq!(witness.read(1, round, 4096).expect_ok(), data);
        }
    }
    rig.check_health();
}

#[test]
fn an_aborted_write_lets_its_late_data_go_nowhere() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    let before = pattern(40960, 1);
    assert!(io.write(1, 0, &before).ok());
    for _ in 0..200 {
        let (cid, ttag) = open_transfer(&mut io, 0, 40960);
        let abort = admin.command(Sqe::new(0x08, 0).dword(10, 1 | u32::from(cid) << 16), &[]);
        assert!(abort.ok());
        assert_eq!(abort.result & 1, 0, "it was aborted");
        let ended = io.complete(&[]);
        assert_eq!((ended.cid, ended.code()), (cid, 0x007));
        io.send_host_data(cid, ttag, 0, &pattern(40960, 2), 8192);
        assert_eq!(io.read(1, 0, 40960).expect_ok(), before);
    }
    // Staying silent costs no queue depth either.
    for _ in 0..300 {
        let (cid, _) = open_transfer(&mut io, 0, 40960);
        assert_eq!(admin.command(Sqe::new(0x08, 0).dword(10, 1 | u32::from(cid) << 16), &[]).result & 1, 0);
        assert_eq!(io.complete(&[]).code(), 0x007);
    }
    assert!(io.write(1, 0, &before).ok());
    // What is not there, or done, is not aborted.
    for command in [1 | 0x7777 << 16, 9 | 1 << 16, 0x7777 << 16] {
        assert_eq!(admin.command(Sqe::new(0x08, 0).dword(10, command), &[]).result & 1, 1);
    }
    rig.check_health();
}

#[test]
fn a_silent_transfer_does_not_delay_other_commands() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    for i in 0..16 {
        open_transfer(&mut io, i * 256, 1 << 20);
    }
    let start = Instant::now();
    assert!(io.read(1, 0, 1 << 20).ok());
    assert!(start.elapsed() < Duration::from_secs(2));
    rig.check_health();
}
