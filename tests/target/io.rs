//! Reading, writing and the other I/O commands.

use std::time::{Duration, Instant};

use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const OUT_OF_RANGE: u16 = 0x080;
const LENGTH_INVALID: u16 = 0x00F;
/// Blocks of the rig's namespace.
const BLOCKS: u64 = 16384;

fn range(slba: u64, blocks: u32) -> [u8; 16] {
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&slba.to_le_bytes());
    range
}

/// Dataset Management with the deallocate attribute.
fn deallocate(io: &mut Wire, ranges: &[[u8; 16]]) -> Completion {
    let data = ranges.concat();
    let sqe = Sqe::new(9, 1).dword(10, ranges.len() as u32 - 1).dword(11, 4);
    io.command(sqe.sgl(IN_CAPSULE, data.len() as u32), &data)
}

#[test]
fn what_is_written_is_read_back_at_every_size() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    for (i, len) in [4096, 8192, 12288, 65536, 131_072, 135_168, 1 << 20].into_iter().enumerate() {
        let data = pattern(len, i as u8);
        assert!(io.write(1, i as u64 * 256, &data).ok(), "{len}");
        assert_eq!(io.read(1, i as u64 * 256, len as u32).expect_ok(), data, "{len}");
    }
    rig.check_health();
}

#[test]
fn an_identifier_can_be_used_again_at_once() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect_as(HOSTNQN, 1024);
    for i in 0..5000 {
        let pdu = io.pdu(4, 0, &Sqe::rw(2, 1, i % 16384, 0).sgl(TRANSPORT, 4096).cid(0).0, &[]);
        io.send(&pdu);
        assert!(io.complete(&[]).ok(), "{i}");
    }
}

#[test]
fn blocks_of_512_bytes_work_too() {
    let rig = Rig::with_device("ram:8MiB?block_size=512");
    let (_admin, mut io) = rig.connect();
    let data = pattern(512 * 5, 3);
    let write = Sqe::rw(1, 1, 7, 4).sgl(IN_CAPSULE, 2560);
    assert!(io.command(write, &data).ok());
    assert_eq!(io.get(Sqe::rw(2, 1, 7, 4), 2560).expect_ok(), data);
    assert_eq!(io.get(Sqe::rw(2, 1, 9, 0), 512).expect_ok(), data[1024..1536]);
    // Blocks times their size must be what the SGL says.
    io.command(Sqe::rw(1, 1, 0, 9).sgl(TRANSPORT, 4096), &[]).expect_refused(LENGTH_INVALID);
    io.command(Sqe::rw(1, 1, 0, 9).sgl(TRANSPORT, 8192), &[]).expect_refused(LENGTH_INVALID);
    io.command(Sqe::rw(1, 1, 0, 9).sgl(IN_CAPSULE, 5120), &[0; 4096]).expect_refused(LENGTH_INVALID);
    io.command(Sqe::rw(1, 1, 0, 7).sgl(IN_CAPSULE, 4096), &[0; 8192]).expect_refused(LENGTH_INVALID);
    io.get(Sqe::rw(2, 1, 0, 9), 4096).expect_refused(LENGTH_INVALID);
    io.command(Sqe::rw(2, 1, 0, 0).sgl(IN_CAPSULE, 512), &[0; 512]).expect_refused(0x011);
    io.command(Sqe::rw(1, 1, 0, 0).sgl(0x40, 512), &[]).expect_refused(0x011);
    assert_eq!(io.get(Sqe::rw(2, 1, 7, 4), 2560).expect_ok(), data, "the connection stays");
}

#[test]
fn ranges_are_checked_in_64_bits_before_any_data_moves() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    for (slba, nlb) in [
        (BLOCKS - 1, 1),
        (BLOCKS, 0),
        (1 << 63, 0),
        (u64::MAX, 0),
        (u64::MAX, 0xFFFF),
        (0, 0xFFFF),
        (BLOCKS, 0xFFFF),
    ] {
        let len = (nlb + 1) * 4096;
        // No R2T may come: the answer is the first thing that does.
        io.submit(Sqe::rw(1, 1, slba, nlb).sgl(TRANSPORT, len), &[]);
        assert_eq!(io.expect(5).completion(Vec::new()).code(), OUT_OF_RANGE, "write {slba:#x} {nlb:#x}");
        io.get(Sqe::rw(2, 1, slba, nlb), len).expect_refused(OUT_OF_RANGE);
        io.command(Sqe::rw(8, 1, slba, nlb), &[]).expect_refused(OUT_OF_RANGE);
        deallocate(&mut io, &[range(slba, nlb + 1)]).expect_refused(OUT_OF_RANGE);
    }
    assert!(io.read(1, BLOCKS - 1, 4096).ok());
    for opcode in [0x04, 0x0D, 0x0E, 0x11, 0x15, 0x80, 0xFF] {
        io.command(Sqe::rw(opcode, 1, 0, 0), &[]).expect_refused(0x001);
    }
    let fused = Sqe::rw(2, 1, 0, 0).sgl(TRANSPORT, 4096);
    let mut first = fused;
    first.0[1] |= 1;
    io.command(first, &[]).expect_refused(0x002);
    rig.check_health();
}

#[test]
fn the_transfer_limit_is_exactly_what_identify_reports() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    let mdts = 4096u32 << admin.identify(1, 0).expect_ok()[77];
    assert!(mdts >= 1 << 20);
    let blocks = mdts / 4096;
    for opcode in [1, 2] {
        for over in [blocks + 1, 4096, 8192] {
            io.submit(Sqe::rw(opcode, 1, 0, over - 1).sgl(TRANSPORT, over * 4096), &[]);
            io.expect(5).completion(Vec::new()).expect_refused(0x002);
        }
    }
    // 64 of the largest at once, both ways.
    let data = pattern(mdts as usize, 5);
    for _ in 0..64 {
        io.submit(Sqe::rw(2, 1, 0, blocks - 1).sgl(TRANSPORT, mdts), &[]);
    }
    for _ in 0..64 {
        assert_eq!(io.complete(&[]).expect_ok().len(), mdts as usize);
    }
    for _ in 0..64 {
        io.submit(Sqe::rw(1, 1, 0, blocks - 1).sgl(TRANSPORT, mdts), &[]);
    }
    for _ in 0..64 {
        assert!(io.complete(&data).ok());
    }
    assert_eq!(io.read(1, 0, mdts).expect_ok(), data);
    rig.check_health();
}

#[test]
fn deallocated_blocks_read_as_zeros_and_their_neighbours_stay() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let data = pattern(65536, 1);
    assert!(io.write(1, 0, &data).ok());
    assert!(deallocate(&mut io, &[range(1, 2), range(5, 0), range(2, 3), range(BLOCKS - 1, 1)]).ok());
    let got = io.read(1, 0, 65536).expect_ok();
    assert_eq!(got[..4096], data[..4096]);
    assert!(got[4096..20480].iter().all(|&b| b == 0));
    assert_eq!(got[20480..], data[20480..]);
    // All or nothing: a range past the end stops the whole command.
    deallocate(&mut io, &[range(8, 1), range(BLOCKS, 1)]).expect_refused(OUT_OF_RANGE);
    assert_eq!(io.read(1, 8, 4096).expect_ok(), data[8 * 4096..9 * 4096]);
    // Without the attribute nothing happens.
    let hint = range(8, 1);
    assert!(io.command(Sqe::new(9, 1).dword(11, 1).sgl(IN_CAPSULE, 16), &hint).ok());
    assert_eq!(io.read(1, 8, 4096).expect_ok(), data[8 * 4096..9 * 4096]);
    // 256 ranges, and a list that is longer than the number of ranges says, as some hosts send it.
    let many: Vec<_> = (0..256).map(|i| range(i, 1)).collect();
    assert!(deallocate(&mut io, &many).ok());
    assert!(io.read(1, 0, 65536).expect_ok().iter().all(|&b| b == 0));
    assert!(io.write(1, 0, &data).ok());
    let mut list = vec![0; 4096];
    list[..16].copy_from_slice(&range(0, 1));
    assert!(io.command(Sqe::new(9, 1).dword(11, 4).sgl(IN_CAPSULE, 4096), &list).ok());
    assert_eq!(io.read(1, 0, 8192).expect_ok()[4096..], data[4096..8192]);
    // A list that is too short, and one that is asked for.
    io.command(Sqe::new(9, 1).dword(10, 1).dword(11, 4).sgl(IN_CAPSULE, 16), &list[..16])
        .expect_refused(LENGTH_INVALID);
    list[..16].copy_from_slice(&range(1, 1));
    io.submit(Sqe::new(9, 1).dword(11, 4).sgl(TRANSPORT, 4096), &[]);
    assert!(io.complete(&list).ok());
    assert!(io.read(1, 1, 4096).expect_ok().iter().all(|&b| b == 0));
}

#[test]
fn write_zeroes_is_not_bound_by_the_transfer_limit() {
    let rig = Rig::with_device("ram:512MiB");
    let (_admin, mut io) = rig.connect();
    for flags in [0, 1 << 25, 1 << 30, 1 << 25 | 1 << 30] {
        let data = pattern(16384, 9);
        assert!(io.write(1, 0, &data).ok() && io.write(1, 65534, &data).ok());
        assert!(io.command(Sqe::rw(8, 1, 1, 0xFFFF | flags), &[]).ok());
        let got = io.read(1, 0, 16384).expect_ok();
        assert_eq!(got[..4096], data[..4096]);
        assert!(got[4096..].iter().all(|&b| b == 0));
        let end = io.read(1, 65534, 16384).expect_ok();
        assert!(end[..12288].iter().all(|&b| b == 0));
        assert_eq!(end[12288..], data[12288..]);
    }
}

#[test]
fn a_read_only_namespace_refuses_every_change() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    let data = pattern(4096, 1);
    assert!(io.write(1, 0, &data).ok());
    let uuid = rimrock_uuid(7);
    let spec = NamespaceSpec {
        read_only: true,
        uuid: Some(uuid),
        ..NamespaceSpec::new(Backend::Device(rig.device.clone()), "ro")
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    assert_eq!(admin.identify(0, 2).expect_ok()[99] & 1, 1, "NSATTR");
    assert_eq!(io.read(2, 0, 4096).expect_ok(), data);
    io.write(2, 0, &[0; 4096]).expect_refused(0x020);
    io.write(2, 0, &[0; 65536]).expect_refused(0x020);
    io.command(Sqe::rw(8, 2, 0, 0), &[]).expect_refused(0x020);
    io.command(Sqe::new(9, 2).dword(11, 4).sgl(IN_CAPSULE, 16), &range(0, 1)).expect_refused(0x020);
    assert!(io.command(Sqe::new(0, 2), &[]).ok(), "flush changes nothing");
    assert_eq!(io.read(2, 0, 4096).expect_ok(), data);
}

fn rimrock_uuid(seed: u8) -> uuid::Uuid {
    uuid::Uuid::from_bytes([seed; 16])
}

#[test]
fn a_namespace_can_be_removed_and_added_under_load() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    for round in 0..50 {
        let mut expected = 0;
        for i in 0..48 {
            io.submit(Sqe::rw(2, 1, i * 16, 15).sgl(TRANSPORT, 65536), &[]);
            expected += 1;
        }
        // Some that wait for data which never comes.
        for i in 0..16 {
            io.submit(Sqe::rw(1, 1, i * 16, 15).sgl(TRANSPORT, 65536), &[]);
            expected += 1;
        }
        let start = Instant::now();
        rig.ask(|target, _| async move { target.remove_namespace(SUBNQN, 1).await });
        assert!(start.elapsed() < Duration::from_secs(2), "round {round}");
        let mut completed = 0;
        while completed < expected {
            let pdu = io.receive().expect("the connection is open");
            match pdu.kind() {
                5 => {
                    let completion = pdu.completion(Vec::new());
                    assert!(matches!(completion.code(), 0 | 0x00B), "{completion:?}");
                    completed += 1;
                }
                7 | 9 => {}
                kind => panic!("PDU {kind}"),
            }
        }
        let spec = NamespaceSpec::new(Backend::Device(rig.device.clone()), "ram");
        assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 1);
        assert!(io.read(1, 0, 4096).ok());
    }
    rig.check_health();
}

#[test]
fn keep_alive_is_answered_while_writes_pour_in() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    let writers: Vec<_> = (1..=4)
        .map(|qid| {
            let mut io = rig.wire();
            io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
            std::thread::spawn(move || {
                let data = pattern(262_144, qid as u8);
                for round in 0..8 {
                    for i in 0..16 {
                        io.submit(Sqe::rw(1, 1, i * 64, 63).sgl(TRANSPORT, 262_144), &[]);
                    }
                    for _ in 0..16 {
                        assert!(io.complete(&data).ok(), "round {round}");
                    }
                }
            })
        })
        .collect();
    while writers.iter().any(|writer| !writer.is_finished()) {
        let start = Instant::now();
        assert!(admin.command(Sqe::new(0x18, 0), &[]).ok());
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
    for writer in writers {
        writer.join().unwrap();
    }
}

#[test]
fn a_resized_backend_is_announced_only_when_it_has_changed() {
    let rig = Rig::start();
    let mut admin = rig.admin();
    assert!(admin.set_feature(0x0B, 0x100).ok());
    admin.submit(Sqe::new(0x0C, 0), &[]);
    assert_eq!(rig.target.namespace_resized(rig.device.info().uuid), 0);
    assert_eq!(rig.target.namespace_resized(rimrock_uuid(1)), 0);
    assert!(admin.command(Sqe::new(0x18, 0), &[]).ok(), "no event came first");
}
