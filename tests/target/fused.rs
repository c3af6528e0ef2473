//! Fused Compare and Write: two commands that are one, and what is left when only one of them is right.

use std::collections::BTreeMap;
use std::time::Duration;

use rimrock::device::{Device, OpenOptions};
use rimrock::pool::{PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const COMPARE: u8 = 0x05;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const INVALID_FIELD: u16 = 0x002;
const FAILED_FUSED: u16 = 0x009;
const MISSING_FUSED: u16 = 0x00A;
const COMPARE_FAILURE: u16 = 0x285;
/// Short, against what never comes.
const MOMENT: Duration = Duration::from_millis(50);

fn fused(mut sqe: Sqe, fuse: u8) -> Sqe {
    sqe.0[1] |= fuse;
    sqe
}

/// A rig with a namespace 2 in blocks of 512 bytes: memory, or a volume.
fn fine_rig(on_volume: bool) -> Rig {
    let rig = Rig::start();
    let backend = match on_volume {
        false => Backend::Device(Device::open("ram:64MiB?block_size=512", OpenOptions::default()).unwrap()),
        true => {
            let manager = PoolManager::new(rig.reactors(), 64 << 20);
            let device = Device::open("ram:256MiB", OpenOptions::default()).unwrap();
            Backend::Volume(block_on(async move {
                let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
                let (name, size, block_size) = ("v".to_owned(), 64 << 20, 512);
                let spec = VolumeSpec { name, size, block_size, write_cache: true, uuid: None };
                pool.volume_create(spec).await.unwrap();
                pool.open("v").await.unwrap()
            }))
        }
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, NamespaceSpec::new(backend, "fine")).unwrap(), 2);
    rig
}

/// Both halves in one segment; what each was answered, and in which order.
fn exchange(io: &mut Wire, sqes: [Sqe; 2], data: [&[u8]; 2]) -> [u16; 2] {
    let (first, second) = (io.next_cid(), io.next_cid());
    let mut bytes = Vec::new();
    for ((sqe, cid), data) in sqes.iter().zip([first, second]).zip(data) {
        let inline = if sqe.0[39] == IN_CAPSULE { data } else { &[] };
        bytes.extend(io.pdu(4, 0, &sqe.cid(cid).0, inline));
    }
    io.send(&bytes);
    let data = BTreeMap::from([(first, data[0]), (second, data[1])]);
    let mut answers = Vec::new();
    while answers.len() < 2 {
        let pdu = io.receive().expect("the connection is open");
        if pdu.kind() == 9 {
            let (cid, ttag, offset, len) =
                (pdu.u16(8), pdu.u16(10), pdu.u32(12) as usize, pdu.u32(16) as usize);
            io.send_host_data(cid, ttag, offset, &data[&cid][offset..offset + len], 16384);
        } else {
            let completion = pdu.completion(Vec::new());
            answers.push((completion.cid, completion.code()));
        }
    }
    assert_eq!(answers[0].0, first, "the first half is answered first");
    assert_eq!(answers[1].0, second);
    [answers[0].1, answers[1].1]
}

/// A pair over blocks of 512 bytes of namespace 2.
fn pair(slba: u64, len: usize, kinds: [u8; 2]) -> [Sqe; 2] {
    let half = |opcode, fuse, kind| {
        fused(Sqe::rw(opcode, 2, slba, (len / 512) as u32 - 1).sgl(kind, len as u32), fuse)
    };
    [half(COMPARE, 1, kinds[0]), half(WRITE, 2, kinds[1])]
}

fn read(io: &mut Wire, slba: u64, len: usize) -> Vec<u8> {
    io.get(Sqe::rw(READ, 2, slba, (len / 512) as u32 - 1), len as u32).expect_ok()
}

fn all_kinds() -> impl Iterator<Item = [u8; 2]> {
    let kinds = [IN_CAPSULE, TRANSPORT];
    kinds.into_iter().flat_map(move |first| kinds.map(|second| [first, second]))
}

#[test]
fn a_pair_writes_if_what_was_there_is_what_was_said() {
    for on_volume in [false, true] {
        let rig = fine_rig(on_volume);
        let (_admin, mut io) = rig.connect();
        for (len, kinds) in [512, 4096, 7 * 512]
            .into_iter()
            .flat_map(|len| all_kinds().map(move |kinds| (len, kinds)))
            .chain([(131_072, [TRANSPORT, TRANSPORT])])
        {
            // Across the boundaries of everything that is larger.
            let slba = 2047;
            let (old, new) = (read(&mut io, slba, len), pattern(len, len as u8 ^ kinds[0] ^ kinds[1] << 1));
            let mut wrong = old.clone();
            wrong[len - 1] ^= 0x80;
            let answers = exchange(&mut io, pair(slba, len, kinds), [&wrong, &new]);
            assert_eq!(answers, [COMPARE_FAILURE, FAILED_FUSED], "{len} {kinds:?}");
            assert!(read(&mut io, slba, len) == old);
            assert_eq!(exchange(&mut io, pair(slba, len, kinds), [&old, &new]), [0, 0], "{len} {kinds:?}");
            assert!(read(&mut io, slba, len) == new);
        }
        rig.check_health();
    }
}

#[test]
fn the_compare_in_the_capsule_and_the_write_by_r2t_stay_in_order() {
    let rig = fine_rig(false);
    let (_admin, mut io) = rig.connect();
    for round in 0..1000 {
        let (old, new) = (read(&mut io, 8, 8192), pattern(8192, round as u8));
        let answers = exchange(&mut io, pair(8, 8192, [IN_CAPSULE, TRANSPORT]), [&old, &new]);
        assert_eq!(answers, [0, 0], "round {round}");
    }
    // With other commands around them.
    for round in 0..200 {
        let (old, new) = (read(&mut io, 8, 8192), pattern(8192, round as u8));
        io.submit(Sqe::rw(READ, 2, 64, 0).sgl(TRANSPORT, 512), &[]);
        assert!(io.complete(&[]).ok());
        assert_eq!(exchange(&mut io, pair(8, 8192, [IN_CAPSULE, TRANSPORT]), [&old, &new]), [0, 0]);
        assert!(read(&mut io, 8, 8192) == new, "round {round}");
    }
    rig.check_health();
}

/// Commands, all in one segment, and their answers by position.
fn answers(io: &mut Wire, sqes: &[Sqe]) -> Vec<u16> {
    let cids: Vec<u16> = sqes.iter().map(|_| io.next_cid()).collect();
    let data = [0; 512];
    let bytes: Vec<u8> = sqes
        .iter()
        .zip(&cids)
        .flat_map(|(sqe, &cid)| {
            io.pdu(4, 0, &sqe.cid(cid).0, if sqe.0[39] == IN_CAPSULE { &data } else { &[] })
        })
        .collect();
    io.send(&bytes);
    let mut found = BTreeMap::new();
    while found.len() < sqes.len() {
        let completion = io.complete(&data);
        assert_eq!(found.insert(completion.cid, completion.code()), None);
    }
    cids.iter().map(|cid| found[cid]).collect()
}

#[test]
fn a_half_without_its_other_half_is_refused_and_disturbs_nobody() {
    let rig = fine_rig(false);
    let (_admin, mut io) = rig.connect();
    let [first, second] = pair(0, 512, [IN_CAPSULE; 2]);
    let read = Sqe::rw(READ, 2, 9, 0).sgl(TRANSPORT, 512);
    let flush = Sqe::new(0, 2);
    // No property command belongs here, so it is refused, and a half that waited for it all the same.
    let property = Sqe::fabrics(4);
    let other_range = fused(Sqe::rw(WRITE, 2, 1, 0).sgl(IN_CAPSULE, 512), 2);
    let longer = fused(Sqe::rw(WRITE, 2, 0, 1).sgl(TRANSPORT, 1024), 2);
    let elsewhere = fused(Sqe::rw(WRITE, 1, 0, 0).sgl(TRANSPORT, 512), 2);
    let outside = fused(Sqe::rw(COMPARE, 2, 1 << 40, 0).sgl(IN_CAPSULE, 512), 1);
    let mismatched = fused(Sqe::rw(WRITE, 2, 0, 0).sgl(TRANSPORT, 1024), 2);
    let too_long = fused(Sqe::rw(COMPARE, 2, 0, 256).sgl(TRANSPORT, 257 * 512), 1);
    let cases: &[(&[Sqe], &[u16])] = &[
        (&[first, read], &[MISSING_FUSED, 0]),
        (&[first, flush], &[MISSING_FUSED, 0]),
        (&[first, property], &[MISSING_FUSED, 0x001]),
        (&[second], &[MISSING_FUSED]),
        (&[second, second], &[MISSING_FUSED, MISSING_FUSED]),
        // Split by other commands in the same segment.
        (&[first, read, second], &[MISSING_FUSED, 0, MISSING_FUSED]),
        (&[first, first, second], &[MISSING_FUSED, 0, 0]),
        (&[first, fused(read, 3)], &[MISSING_FUSED, INVALID_FIELD]),
        (&[fused(read, 3), second], &[INVALID_FIELD, MISSING_FUSED]),
        // Halves that do not belong together.
        (&[first, other_range], &[FAILED_FUSED, INVALID_FIELD]),
        (&[first, longer], &[FAILED_FUSED, INVALID_FIELD]),
        (&[first, elsewhere], &[FAILED_FUSED, INVALID_FIELD]),
        (&[first, fused(read, 2)], &[FAILED_FUSED, INVALID_FIELD]),
        (&[first, mismatched], &[FAILED_FUSED, 0x00F]),
        // A first half that fails takes the second with it, and only that.
        (&[outside, second], &[0x080, FAILED_FUSED]),
        (&[too_long, second], &[0x014, FAILED_FUSED]),
        (&[fused(read, 1), second], &[INVALID_FIELD, FAILED_FUSED]),
        (&[fused(Sqe::rw(WRITE, 2, 0, 0).sgl(IN_CAPSULE, 512), 1), second], &[INVALID_FIELD, FAILED_FUSED]),
        (&[outside, read, second], &[0x080, 0, MISSING_FUSED]),
        (&[first, second], &[0, 0]),
    ];
    for (i, (sqes, expected)) in cases.iter().enumerate() {
        assert_eq!(answers(&mut io, sqes), *expected, "case {i}");
        assert!(read_zeros(&mut io), "case {i}");
    }
    // A half that waits keeps nothing but its identifier, and its connection may end.
    let cid = io.submit(first, &[0; 512]);
    io.send(&io.pdu(4, 0, &Sqe::new(0, 2).cid(cid).0, &[]));
    io.complete(&[]).expect_refused(0x003);
    drop(io);
    rig.check_health();
}

fn read_zeros(io: &mut Wire) -> bool {
    read(io, 0, 1024).iter().all(|&byte| byte == 0)
}

#[test]
fn a_pair_cannot_change_what_must_not_change() {
    let rig = Rig::start();
    let spec = NamespaceSpec {
        read_only: true,
        uuid: Some(uuid::Uuid::from_bytes([3; 16])),
        ..NamespaceSpec::new(Backend::Device(rig.device.clone()), "ro")
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    let (_admin, mut io) = rig.connect();
    let half = |opcode, fuse| fused(Sqe::rw(opcode, 2, 0, 0).sgl(IN_CAPSULE, 4096), fuse);
    let answers = exchange(&mut io, [half(COMPARE, 1), half(WRITE, 2)], [&[0; 4096], &[1; 4096]]);
    assert_eq!(answers, [FAILED_FUSED, 0x020]);
    assert_eq!(io.read(1, 0, 4096).expect_ok(), [0; 4096]);
    rig.check_health();
}

#[test]
fn a_broken_digest_of_one_half_fails_both() {
    let rig = fine_rig(false);
    let admin = rig.admin();
    for broken in [0, 1] {
        let mut io = Wire::open(rig.addr);
        io.handshake_with(0, 2);
        io.connect_io(&admin, HOSTNQN, 1 + broken as u16, 32).expect_ok();
        let sqes = pair(0, 512, [IN_CAPSULE; 2]);
        let mut bytes = Vec::new();
        for (i, sqe) in sqes.iter().enumerate() {
            let mut pdu = io.pdu(4, 0, &sqe.cid(100 + i as u16).0, &[0; 512]);
            if i == broken {
                let at = pdu.len() - 5;
                pdu[at] ^= 1;
            }
            bytes.extend(pdu);
        }
        io.send(&bytes);
        let codes = [io.complete(&[]).code(), io.complete(&[]).code()];
        let expected = [[0x022, FAILED_FUSED], [FAILED_FUSED, 0x022]][broken];
        assert_eq!(codes, expected);
        assert!(read_zeros(&mut io));
    }
    rig.check_health();
}

/// Adds one to the number in a block `rounds` times by pairs; how often another was quicker.
fn count_up(io: &mut Wire, slba: u64, rounds: u64, kinds: [u8; 2]) -> u64 {
    let mut lost = 0;
    let mut done = 0;
    while done < rounds {
        let old = read(io, slba, 512);
        let number = u64::from_le_bytes(old[..8].try_into().unwrap()) + 1;
        let mut new = old.clone();
        new[..8].copy_from_slice(&number.to_le_bytes());
        match exchange(io, pair(slba, 512, kinds), [&old, &new]) {
            [0, 0] => done += 1,
            [COMPARE_FAILURE, FAILED_FUSED] => lost += 1,
            other => panic!("{other:x?}"),
        }
    }
    lost
}

#[test]
fn of_hosts_that_race_for_one_block_exactly_one_wins_each_time() {
    const ROUNDS: u64 = 300;
    for on_volume in [false, true] {
        let rig = fine_rig(on_volume);
        let hosts: Vec<_> = (0..4)
            .map(|i| {
                let (admin, mut io) = rig.connect_as(&format!("nqn.2024-01.org.example:h{i}"), 32);
                let kinds = all_kinds().nth(i).unwrap();
                std::thread::spawn(move || {
                    let lost = count_up(&mut io, 5, ROUNDS, kinds);
                    drop(admin);
                    lost
                })
            })
            .collect();
        // Neighbours within the same 4 KiB are written meanwhile.
        let (_admin, mut io) = rig.connect();
        let mut round = 0u32;
        while hosts.iter().any(|host| !host.is_finished()) {
            round += 1;
            let data = pattern(512, round as u8);
            for slba in [4, 6] {
                assert!(io.command(Sqe::rw(WRITE, 2, slba, 0).sgl(IN_CAPSULE, 512), &data).ok());
                assert!(read(&mut io, slba, 512) == data);
            }
        }
        let lost: u64 = hosts.into_iter().map(|host| host.join().unwrap()).sum();
        let count = u64::from_le_bytes(read(&mut io, 5, 512)[..8].try_into().unwrap());
        assert_eq!(count, 4 * ROUNDS, "{lost} were too late");
        rig.check_health();
    }
}

#[test]
fn writes_of_others_wait_while_a_range_is_claimed_and_elsewhere_they_do_not() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let data = pattern(4096, 1);
    let device = rig.device.clone();
    let waker = std::task::Waker::noop();
    let mut claim = Box::pin(device.gate().claim(8192..12288));
    let std::task::Poll::Ready(claimed) = claim.as_mut().poll(&mut std::task::Context::from_waker(waker))
    else {
        panic!("nobody writes")
    };
    // Every kind of change waits: writes of one block and of more, zeroes, deallocation, copies.
    io.submit(Sqe::rw(WRITE, 1, 2, 0).sgl(IN_CAPSULE, 4096), &data);
    io.submit(Sqe::rw(WRITE, 1, 1, 1).sgl(IN_CAPSULE, 8192), &[7; 8192]);
    io.submit(Sqe::rw(0x08, 1, 0, 9), &[]);
    let mut range = [0; 16];
    range[4] = 1;
    range[8] = 2;
    io.submit(Sqe::new(0x09, 1).dword(11, 4).sgl(IN_CAPSULE, 16), &range);
    let mut source = [0; 32];
    source[8] = 50;
    io.submit(Sqe::new(0x19, 1).dword(10, 2).sgl(IN_CAPSULE, 32), &source);
    // Whoever reads, and whoever writes elsewhere, does not.
    let elsewhere = io.submit(Sqe::rw(WRITE, 1, 3, 0).sgl(IN_CAPSULE, 4096), &data);
    assert_eq!(io.complete(&[]).cid, elsewhere);
    assert_eq!(io.read(1, 2, 4096).expect_ok(), [0; 4096]);
    io.stream.set_read_timeout(Some(MOMENT)).unwrap();
    let early = std::io::Read::read(&mut &io.stream, &mut [0]);
    assert!(early.is_err(), "nothing is answered while the range is claimed");
    io.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    drop(claimed);
    for _ in 0..5 {
        assert!(io.complete(&[]).ok());
    }
    rig.check_health();
}
