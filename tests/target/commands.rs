//! Compare, Verify, Copy and Write Zeroes: over raw memory and over volumes of a pool.

use std::cell::RefCell;
use std::sync::Arc;

use proptest::prelude::*;
use rimrock::device::{Device, OpenOptions, SimDisks, SimFaults, SimSpec};
use rimrock::host::{ControllerOptions, HostError, blocking};
use rimrock::nvme::Status;
use rimrock::pool::{Pool, PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const WRITE_ZEROES: u8 = 0x08;
const COMPARE: u8 = 0x05;
const VERIFY: u8 = 0x0C;
const COPY: u8 = 0x19;
const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;

const INVALID_FIELD: u16 = 0x002;
const INVALID_NAMESPACE: u16 = 0x00B;
const LENGTH_INVALID: u16 = 0x00F;
const TYPE_INVALID: u16 = 0x011;
const SGL_OFFSET_INVALID: u16 = 0x016;
const WRITE_PROTECTED: u16 = 0x020;
const OUT_OF_RANGE: u16 = 0x080;
const CAPACITY_EXCEEDED: u16 = 0x081;
const SIZE_LIMIT_EXCEEDED: u16 = 0x183;
const UNRECOVERED: u16 = 0x281;
const COMPARE_FAILURE: u16 = 0x285;

const MIB: u64 = 1 << 20;
/// Blocks of the rig's namespace 1.
const BLOCKS: u64 = 16384;
/// MSSRL and MCL in bytes, and MSRC + 1.
const COPY_BYTES: u64 = MIB;
const COPY_RANGES: usize = 128;

// ---- places --------------------------------------------------------------------------------------------------------

/// A volume of `mib` MiB as a namespace of the rig, in a pool on `device`.
fn add_volume(rig: &Rig, device: Device, mib: u64, block_size: u32) -> (u32, Arc<Pool>) {
    let manager = PoolManager::new(rig.reactors(), 64 << 20);
    let (pool, volume) = block_on(async move {
        let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
        let size = mib * MIB;
        pool.volume_create(VolumeSpec { name: "v".into(), size, block_size, write_cache: true, uuid: None })
            .await
            .unwrap();
        let volume = pool.open("v").await.unwrap();
        (pool, volume)
    });
    let spec = NamespaceSpec::new(Backend::Volume(volume), "pool/v");
    (rig.target.add_namespace(SUBNQN, spec).unwrap(), pool)
}

/// A simulated disk that does everything at once.
fn sim_disk(mib: u64) -> (SimDisks, Device) {
    let spec = SimSpec { size: mib * MIB, write_cache: false, latency: false, slow_reads: false };
    let disks = SimDisks::new(1, vec![spec]);
    let device = disks.open().remove(0);
    (disks, device)
}

/// A rig with namespaces of every kind, and for each its NSID and block size: raw memory and a volume, in both formats.
fn mixed_rig() -> (Rig, [(u32, u32); 4]) {
    let rig = Rig::start();
    let ram = |uri: &str| Device::open(uri, OpenOptions::default()).unwrap();
    let small = NamespaceSpec::new(Backend::Device(ram("ram:64MiB?block_size=512")), "small");
    let small = rig.target.add_namespace(SUBNQN, small).unwrap();
    let [volume, fine] = [4096, 512].map(|block_size| add_volume(&rig, ram("ram:256MiB"), 64, block_size).0);
    (rig, [(1, 4096), (small, 512), (volume, 4096), (fine, 512)])
}

/// Writes whole blocks through R2T.
fn write(io: &mut Wire, (nsid, block): (u32, u32), slba: u64, data: &[u8]) {
    let len = data.len() as u32;
    io.submit(Sqe::rw(1, nsid, slba, len / block - 1).sgl(TRANSPORT, len), &[]);
    io.complete(data).expect_ok();
}

fn read(io: &mut Wire, (nsid, block): (u32, u32), slba: u64, len: usize) -> Vec<u8> {
    io.get(Sqe::rw(2, nsid, slba, len as u32 / block - 1), len as u32).expect_ok()
}

/// Compare, with its data in the capsule if `kind` says so.
fn compare(io: &mut Wire, (nsid, block): (u32, u32), slba: u64, data: &[u8], kind: u8) -> Completion {
    let len = data.len() as u32;
    let sqe = Sqe::rw(COMPARE, nsid, slba, len / block - 1).sgl(kind, len);
    io.submit(sqe, if kind == IN_CAPSULE { data } else { &[] });
    io.complete(data)
}

fn verify(io: &mut Wire, nsid: u32, slba: u64, blocks: u32) -> Completion {
    io.command(Sqe::rw(VERIFY, nsid, slba, blocks - 1), &[])
}

/// The list of a Copy in one of the two formats, laid out by hand.
fn sources(format: u8, ranges: &[(u64, u32)]) -> Vec<u8> {
    let entry = if format == 0 { 32 } else { 40 };
    let mut list = vec![0; ranges.len() * entry];
    for (entry, (slba, blocks)) in list.chunks_exact_mut(entry).zip(ranges) {
        entry[8..16].copy_from_slice(&slba.to_le_bytes());
        entry[16..18].copy_from_slice(&((blocks - 1) as u16).to_le_bytes());
    }
    list
}

fn copy_sqe(nsid: u32, to: u64, ranges: usize, format: u8) -> Sqe {
    let dword12 = (ranges as u32 - 1) | u32::from(format) << 8;
    Sqe::new(COPY, nsid).dword(10, to as u32).dword(11, (to >> 32) as u32).dword(12, dword12)
}

fn copy_with(io: &mut Wire, nsid: u32, to: u64, ranges: &[(u64, u32)], format: u8, kind: u8) -> Completion {
    let list = sources(format, ranges);
    let sqe = copy_sqe(nsid, to, ranges.len(), format).sgl(kind, list.len() as u32);
    io.submit(sqe, if kind == IN_CAPSULE { &list } else { &[] });
    io.complete(&list)
}

fn copy(io: &mut Wire, nsid: u32, to: u64, ranges: &[(u64, u32)]) -> Completion {
    copy_with(io, nsid, to, ranges, 0, IN_CAPSULE)
}

// ---- compare -------------------------------------------------------------------------------------------------------

#[test]
fn compare_tells_what_is_there_from_everything_else() {
    let (rig, places) = mixed_rig();
    let (_admin, mut io) = rig.connect();
    for place in places {
        for (len, kind) in
            [(4096, IN_CAPSULE), (8192, IN_CAPSULE), (4096, TRANSPORT), (MIB as usize, TRANSPORT)]
        {
            // Across a chunk of a volume.
            let slba = (MIB * 3 - 4096) / u64::from(place.1);
            let mut data = pattern(len, len as u8);
            write(&mut io, place, slba, &data);
            assert!(compare(&mut io, place, slba, &data, kind).ok(), "{place:?} {len}");
            for at in [0, len / 2, len - 1] {
                data[at] ^= 1;
                compare(&mut io, place, slba, &data, kind).expect_refused(COMPARE_FAILURE);
                data[at] ^= 1;
            }
            assert!(read(&mut io, place, slba, len) == data, "comparing changes nothing");
        }
        // What was never written is zeros.
        let slba = 40 * MIB / u64::from(place.1);
        assert!(compare(&mut io, place, slba, &[0; 8192], IN_CAPSULE).ok());
        compare(&mut io, place, slba, &pattern(8192, 1), IN_CAPSULE).expect_refused(COMPARE_FAILURE);
    }
    rig.check_health();
}

#[test]
fn compare_is_checked_as_a_write_is() {
    let (rig, [place, small, ..]) = mixed_rig();
    let (mut admin, mut io) = rig.connect();
    let mdts = 4096u32 << admin.identify(1, 0).expect_ok()[77];
    let blocks = mdts / 4096;
    let data = pattern(mdts as usize, 2);
    write(&mut io, place, 0, &data);
    assert!(compare(&mut io, place, 0, &data, TRANSPORT).ok());
    for over in [blocks + 1, 4096, 8192] {
        // No R2T may come: the answer is the first thing that does.
        io.submit(Sqe::rw(COMPARE, 1, 0, over - 1).sgl(TRANSPORT, over * 4096), &[]);
        io.expect(5).completion(Vec::new()).expect_refused(INVALID_FIELD);
    }
    let sqe = |nlb: u32| Sqe::rw(COMPARE, small.0, 0, nlb);
    io.command(sqe(9).sgl(TRANSPORT, 4096), &[]).expect_refused(LENGTH_INVALID);
    io.command(sqe(9).sgl(TRANSPORT, 8192), &[]).expect_refused(LENGTH_INVALID);
    io.command(sqe(9).sgl(IN_CAPSULE, 5120), &[0; 4096]).expect_refused(LENGTH_INVALID);
    io.command(sqe(0).sgl(0x40, 512), &[]).expect_refused(TYPE_INVALID);
    let mut offset = sqe(0).sgl(IN_CAPSULE, 512);
    offset.0[24] = 8;
    io.command(offset, &[0; 512]).expect_refused(SGL_OFFSET_INVALID);
    let mut prp = sqe(0).sgl(TRANSPORT, 512);
    prp.0[1] = 0;
    io.command(prp, &[]).expect_refused(INVALID_FIELD);
    assert!(compare(&mut io, small, 0, &[0; 512], IN_CAPSULE).ok(), "the connection stays");
    rig.check_health();
}

// ---- what all of them refuse ---------------------------------------------------------------------------------------

#[test]
fn ranges_and_namespaces_are_checked_before_anything_is_done() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let before = pattern(4096, 3);
    assert!(io.write(1, BLOCKS - 1, &before).ok());
    for (slba, nlb) in [
        (BLOCKS - 1, 1),
        (BLOCKS, 0),
        (1 << 63, 0),
        (u64::MAX, 0),
        (u64::MAX, 0xFFFF),
        (0, 0xFFFF),
        (BLOCKS, 0xFFFF),
    ] {
        io.submit(Sqe::rw(COMPARE, 1, slba, nlb).sgl(TRANSPORT, (nlb + 1) * 4096), &[]);
        io.expect(5).completion(Vec::new()).expect_refused(OUT_OF_RANGE);
        verify(&mut io, 1, slba, nlb + 1).expect_refused(OUT_OF_RANGE);
        if nlb < 256 {
            copy(&mut io, 1, 0, &[(BLOCKS - 1, 1), (slba, nlb + 1)]).expect_refused(OUT_OF_RANGE);
            copy(&mut io, 1, slba, &[(BLOCKS - 1, nlb.min(1)), (0, nlb.max(1))][1 - nlb.min(1) as usize..])
                .expect_refused(OUT_OF_RANGE);
        }
    }
    for nsid in [0, 2, 1024, 1025, 0xFFFF_FFFE, 0xFFFF_FFFF] {
        compare(&mut io, (nsid, 4096), 0, &before, IN_CAPSULE).expect_refused(INVALID_NAMESPACE);
        verify(&mut io, nsid, 0, 1).expect_refused(INVALID_NAMESPACE);
        copy(&mut io, nsid, 0, &[(0, 1)]).expect_refused(INVALID_NAMESPACE);
    }
    assert!(verify(&mut io, 1, BLOCKS - 1, 1).ok());
    assert_eq!(io.read(1, BLOCKS - 1, 4096).expect_ok(), before);
    assert_eq!(io.read(1, 0, 4096).expect_ok(), [0; 4096], "no copy was begun");
    rig.check_health();
}

#[test]
fn what_changes_nothing_is_allowed_where_nothing_may_change() {
    let rig = Rig::start();
    let (_admin, mut io) = rig.connect();
    let data = pattern(8192, 1);
    assert!(io.write(1, 0, &data).ok());
    let spec = NamespaceSpec {
        read_only: true,
        uuid: Some(uuid::Uuid::from_bytes([7; 16])),
        ..NamespaceSpec::new(Backend::Device(rig.device.clone()), "ro")
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    assert!(compare(&mut io, (2, 4096), 0, &data, IN_CAPSULE).ok());
    assert!(verify(&mut io, 2, 0, 65536.min(BLOCKS as u32)).ok());
    copy(&mut io, 2, 1, &[(0, 1)]).expect_refused(WRITE_PROTECTED);
    for flags in [0, DEAC, FUA] {
        io.command(Sqe::rw(WRITE_ZEROES, 2, 0, flags), &[]).expect_refused(WRITE_PROTECTED);
    }
    assert_eq!(io.read(2, 0, 8192).expect_ok(), data);
    rig.check_health();
}

// ---- verify, and damage --------------------------------------------------------------------------------------------

#[test]
fn verify_is_not_bound_by_the_transfer_limit() {
    let rig = Rig::with_device("ram:512MiB");
    let (_admin, mut io) = rig.connect();
    assert!(verify(&mut io, 1, 3, 65536).ok());
    let reads = |rig: &Rig| rig.device.traffic().read_bytes;
    let before = reads(&rig);
    assert!(verify(&mut io, 1, 7, 1000).ok());
    assert_eq!(reads(&rig) - before, 1000 * 4096, "each block was read, once");
    // Many at once take turns.
    for i in 0..64 {
        io.submit(Sqe::rw(VERIFY, 1, i, 4095), &[]);
    }
    for _ in 0..64 {
        assert!(io.complete(&[]).ok());
    }
    rig.check_health();
}

#[test]
fn rot_is_found_and_goes_nowhere() {
    for block_size in [4096, 512] {
        let rig = Rig::start();
        let (disks, device) = sim_disk(256);
        let (nsid, _pool) = add_volume(&rig, device, 64, block_size);
        let place = (nsid, block_size);
        let (_admin, mut io) = rig.connect();
        let of = |byte: u64| byte / u64::from(block_size);
        let blocks = 64 * 4096 / block_size;
        let mut data = pattern(64 * 4096, 5);
        for (number, block) in data.chunks_exact_mut(4096).enumerate() {
            block[0] = number as u8;
        }
        write(&mut io, place, 0, &data);
        let there = pattern(4 * 4096, 6);
        write(&mut io, place, of(MIB), &there);
        let rotten = &data[20 * 4096..21 * 4096];
        let found: Vec<u64> =
            disks.blocks(0).into_iter().filter(|&block| disks.block(0, block) == rotten).collect();
        let [block] = found[..] else { panic!("{found:?}") };
        disks.flip(0, block * 4096 + 9, 3);
        let unit = 4096 / block_size;
        // What holds it fails, what does not is good.
        verify(&mut io, nsid, 0, blocks).expect_refused(UNRECOVERED);
        verify(&mut io, nsid, of(20 * 4096), unit).expect_refused(UNRECOVERED);
        assert!(verify(&mut io, nsid, 0, 20 * unit).ok());
        assert!(verify(&mut io, nsid, of(21 * 4096), 43 * unit).ok());
        compare(&mut io, place, 0, &data, TRANSPORT).expect_refused(UNRECOVERED);
        compare(&mut io, place, of(20 * 4096), rotten, IN_CAPSULE).expect_refused(UNRECOVERED);
        // A copy that cannot read one of its sources has changed nothing.
        copy(&mut io, nsid, of(MIB), &[(0, unit), (of(20 * 4096), unit)]).expect_refused(UNRECOVERED);
        assert!(read(&mut io, place, of(MIB), 4 * 4096) == there);
        assert!(copy(&mut io, nsid, of(MIB), &[(0, unit), (of(21 * 4096), unit)]).ok());
        let copied = [&data[..4096], &data[21 * 4096..22 * 4096], &there[8192..]].concat();
        assert!(read(&mut io, place, of(MIB), 4 * 4096) == copied);
        rig.check_health();
    }
}

#[test]
fn a_raw_device_that_cannot_be_read_is_an_error_of_each_of_them() {
    let rig = Rig::start();
    let (disks, device) = sim_disk(64);
    let spec = NamespaceSpec::new(Backend::Device(device), "sim");
    let nsid = rig.target.add_namespace(SUBNQN, spec).unwrap();
    let (_admin, mut io) = rig.connect();
    let data = pattern(4096, 1);
    assert!(io.write(nsid, 0, &data).ok());
    disks.set_faults(SimFaults { reads: 1_000_000, ..SimFaults::default() });
    assert_eq!(verify(&mut io, nsid, 0, 1).code(), UNRECOVERED);
    assert_eq!(compare(&mut io, (nsid, 4096), 0, &data, IN_CAPSULE).code(), UNRECOVERED);
    assert_eq!(copy(&mut io, nsid, 1, &[(0, 1)]).code(), UNRECOVERED);
    disks.set_faults(SimFaults { writes: 1_000_000, ..SimFaults::default() });
    assert_eq!(copy(&mut io, nsid, 1, &[(0, 1)]).code(), 0x280, "Write Fault");
    disks.set_faults(SimFaults::default());
    assert!(copy(&mut io, nsid, 1, &[(0, 1)]).ok());
    assert_eq!(io.read(nsid, 1, 4096).expect_ok(), data);
    rig.check_health();
}

// ---- copy ----------------------------------------------------------------------------------------------------------

#[test]
fn copies_put_their_sources_one_after_the_other() {
    let (rig, places) = mixed_rig();
    let (_admin, mut io) = rig.connect();
    for place in places {
        let block = place.1 as usize;
        let data = pattern(64 * block, 8);
        let part = |slba: usize, blocks: usize| &data[slba * block..][..blocks * block];
        write(&mut io, place, 0, &data);
        for format in [0, 1] {
            for kind in [IN_CAPSULE, TRANSPORT] {
                let ranges = [(60, 4), (0, 1), (7, 2), (7, 2)];
                let to = 5000 + u64::from(format) * 50 + u64::from(kind);
                assert!(copy_with(&mut io, place.0, to, &ranges, format, kind).ok());
                let expected = [part(60, 4), part(0, 1), part(7, 2), part(7, 2)].concat();
                assert!(read(&mut io, place, to, 9 * block) == expected, "{place:?} {format} {kind}");
            }
        }
        // As many ranges and as many blocks as there may be, also in a list that is longer than it need be.
        let most = (COPY_BYTES / u64::from(place.1)) as u32;
        assert!(copy(&mut io, place.0, 6000, &[(0, most)]).ok());
        let many: Vec<_> = (0..COPY_RANGES).map(|i| (i as u64 % 64, 1)).collect();
        for format in [0, 1] {
            assert!(copy_with(&mut io, place.0, 9000, &many, format, TRANSPORT).ok());
            let expected = [&data[..], &data[..]].concat();
            assert!(read(&mut io, place, 9000, 128 * block) == expected);
        }
        let mut long = sources(0, &[(3, 1)]);
        long.resize(4096, 0xFF);
        assert!(io.command(copy_sqe(place.0, 9000, 1, 0).sgl(IN_CAPSULE, 4096), &long).ok());
        assert!(read(&mut io, place, 9000, block) == part(3, 1));
    }
    rig.check_health();
}

#[test]
fn copies_that_ask_for_too_much_or_make_no_sense_change_nothing() {
    let (rig, places) = mixed_rig();
    let (mut admin, mut io) = rig.connect();
    for place in places {
        let (nsid, block) = (place.0, u64::from(place.1));
        let id = admin.identify(0, nsid).expect_ok();
        let most = COPY_BYTES / block;
        assert_eq!(u64::from(u16::from_le_bytes(id[74..76].try_into().unwrap())), most, "MSSRL");
        assert_eq!(u64::from(u32::from_le_bytes(id[76..80].try_into().unwrap())), most, "MCL");
        assert_eq!(usize::from(id[80]), COPY_RANGES - 1, "MSRC");
        let before = pattern(8 * block as usize, 1);
        write(&mut io, place, 0, &before);
        let most = most as u32;
        for ranges in
            [vec![(9, most + 1)], vec![(9, 65536)], vec![(9, most), (9, 1)], vec![(9, most / 2 + 1); 2]]
        {
            for format in [0, 1] {
                copy_with(&mut io, nsid, 0, &ranges, format, IN_CAPSULE).expect_refused(SIZE_LIMIT_EXCEEDED);
            }
        }
        for count in [COPY_RANGES + 1, 256] {
            // Refused for its count alone, without a look at the list.
            let len = count as u32 * 32;
            io.submit(copy_sqe(nsid, 0, count, 0).sgl(TRANSPORT, len), &[]);
            io.expect(5).completion(Vec::new()).expect_refused(SIZE_LIMIT_EXCEEDED);
        }
        for format in 2..16 {
            io.submit(copy_sqe(nsid, 0, 1, format).sgl(TRANSPORT, 32), &[]);
            io.expect(5).completion(Vec::new()).expect_refused(INVALID_FIELD);
        }
        // A list that is too short for its ranges, or too long for any.
        for (count, format, len) in
            [(2, 0, 32), (1, 0, 31), (1, 1, 32), (1, 0, 0), (1, 0, 8224), (1, 1, 10280)]
        {
            io.submit(copy_sqe(nsid, 0, count, format).sgl(TRANSPORT, len), &[]);
            io.expect(5).completion(Vec::new()).expect_refused(LENGTH_INVALID);
        }
        io.command(copy_sqe(nsid, 0, 1, 0).sgl(IN_CAPSULE, 32), &[0; 40]).expect_refused(LENGTH_INVALID);
        io.command(copy_sqe(nsid, 0, 1, 0).sgl(0x40, 32), &[]).expect_refused(TYPE_INVALID);
        assert!(read(&mut io, place, 0, before.len()) == before);
    }
    rig.check_health();
}

/// Sources and destination of a Copy within the first `BLOCKS` of a namespace.
fn any_copy() -> impl Strategy<Value = (Vec<(u64, u32)>, u64, u8)> {
    const SPACE: u64 = 96;
    let range = (0..SPACE, 1..12u32).prop_map(|(slba, blocks)| (slba, blocks.min((SPACE - slba) as u32)));
    (prop::collection::vec(range, 1..8), 0..SPACE, 0..2u8)
}

#[test]
fn copies_agree_with_a_model_however_they_overlap() {
    const SPACE: usize = 96 + 8 * 12;
    let (rig, places) = mixed_rig();
    let (_admin, io) = rig.connect();
    let io = RefCell::new(io);
    for place in places {
        let block = place.1 as usize;
        let model = RefCell::new(pattern(SPACE * block, 77));
        write(&mut io.borrow_mut(), place, 0, &model.borrow());
        proptest!(ProptestConfig::with_cases(64), |((ranges, to, format) in any_copy())| {
            let (mut io, mut model) = (io.borrow_mut(), model.borrow_mut());
            prop_assert!(copy_with(&mut io, place.0, to, &ranges, format, IN_CAPSULE).ok());
            let sources = ranges.iter().map(|&(slba, blocks)| {
                model[slba as usize * block..][..blocks as usize * block].to_vec()
            });
            let copied = sources.collect::<Vec<_>>().concat();
            model[to as usize * block..][..copied.len()].copy_from_slice(&copied);
            let found = read(&mut io, place, 0, SPACE * block);
            prop_assert!(found == *model, "{place:?}");
        });
    }
    rig.check_health();
}

#[test]
fn a_full_pool_refuses_copies_and_takes_zeroes() {
    let rig = Rig::start();
    let device = Device::open("ram:128MiB", OpenOptions::default()).unwrap();
    let (nsid, _pool) = add_volume(&rig, device, 1024, 4096);
    let place = (nsid, 4096);
    let (_admin, mut io) = rig.connect();
    let data = pattern(MIB as usize, 1);
    let full = (0..).find(|&mib| {
        io.submit(Sqe::rw(1, nsid, mib * 256, 255).sgl(TRANSPORT, MIB as u32), &[]);
        let completion = io.complete(&data);
        if !completion.ok() {
            completion.expect_refused(CAPACITY_EXCEEDED);
            return true;
        }
        false
    });
    assert!(full > Some(16), "{full:?}");
    // The rests of all shards, then nothing.
    let refused = (0..1000).find(|&mib| {
        let completion = copy(&mut io, nsid, (512 + mib % 500) * 256, &[(0, 256)]);
        (!completion.ok()).then(|| completion.expect_refused(CAPACITY_EXCEEDED)).is_some()
    });
    assert!(refused.is_some());
    assert!(verify(&mut io, nsid, 0, 4096).ok());
    assert!(compare(&mut io, place, 256, &data, TRANSPORT).ok());
    assert!(io.command(Sqe::rw(WRITE_ZEROES, nsid, 0, 4095 | DEAC), &[]).ok());
    assert!(read(&mut io, place, 256, MIB as usize).iter().all(|&byte| byte == 0));
    rig.check_health();
}

// ---- write zeroes, FUA ---------------------------------------------------------------------------------------------

#[test]
fn zeroes_take_no_space_and_never_show_what_a_snapshot_holds() {
    let rig = Rig::start();
    let device = Device::open("ram:256MiB", OpenOptions::default()).unwrap();
    let (nsid, pool) = add_volume(&rig, device, 64, 512);
    let place = (nsid, 512);
    let (mut admin, mut io) = rig.connect();
    let data = pattern(MIB as usize, 4);
    write(&mut io, place, 0, &data);
    block_on(async move { pool.snapshot_create("v", "v@1").await.map(drop) }).unwrap();
    let id = admin.identify(0, nsid).expect_ok();
    assert_eq!(id[33], 1 | 1 << 3, "DLFEAT: zeros, and Write Zeroes deallocates");
    assert_eq!(admin.get(Sqe::new(IDENTIFY, 0).dword(10, 6), 4096).expect_ok()[..8], [0; 8], "VSL, WZSL ...");
    let used = |admin: &mut Wire| {
        u64::from_le_bytes(admin.identify(0, nsid).expect_ok()[16..24].try_into().unwrap())
    };
    assert_eq!(used(&mut admin), 2048);
    for flags in [0, DEAC, FUA, DEAC | FUA] {
        // Whole blocks of the volume, and parts of blocks at both ends.
        assert!(io.command(Sqe::rw(WRITE_ZEROES, nsid, 3, 1020 | flags), &[]).ok());
        let found = read(&mut io, place, 0, MIB as usize);
        assert!(found[..3 * 512] == data[..3 * 512] && found[1024 * 512..] == data[1024 * 512..]);
        assert!(found[3 * 512..1024 * 512].iter().all(|&byte| byte == 0), "{flags:#x}");
        assert_eq!(used(&mut admin), 1024 + 8, "the first block and the second half");
    }
    assert!(io.command(Sqe::rw(WRITE_ZEROES, nsid, 0, 0xFFFF | DEAC), &[]).ok());
    assert_eq!(used(&mut admin), 0);
    rig.check_health();
}

#[test]
fn a_read_with_fua_reads_what_is_durable() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("disk.img");
    let rig = Rig::with_device(&format!("uring:{}?size=64MiB", file.display()));
    let (mut admin, mut io) = rig.connect();
    assert_eq!(admin.identify(1, 0).expect_ok()[525] & 1, 1, "VWC");
    let data = pattern(4096, 1);
    assert!(io.write(1, 0, &data).ok());
    let flushes = || rig.target.subsystem(SUBNQN).unwrap().namespaces[0].flushes;
    let before = flushes();
    // Limited Retry is a wish that changes nothing.
    assert_eq!(io.get(Sqe::rw(2, 1, 0, 1 << 31), 4096).expect_ok(), data);
    assert_eq!(flushes(), before);
    assert_eq!(io.get(Sqe::rw(2, 1, 0, FUA), 4096).expect_ok(), data);
    assert!(io.command(Sqe::rw(COMPARE, 1, 0, FUA).sgl(IN_CAPSULE, 4096), &data).ok());
    assert!(io.command(Sqe::rw(VERIFY, 1, 0, FUA), &[]).ok());
    assert_eq!(flushes() - before, 3);
    let list = sources(0, &[(0, 1)]);
    let sqe = copy_sqe(1, 9, 1, 0).dword(12, FUA).sgl(IN_CAPSULE, 32);
    assert!(io.command(sqe, &list).ok());
    assert_eq!(flushes() - before, 4, "what was copied is durable");
    rig.check_health();
}

// ---- what is said of it --------------------------------------------------------------------------------------------

#[test]
fn the_effects_log_and_identify_tell_exactly_what_there_is() {
    let rig = Rig::start();
    let (mut admin, mut io) = rig.connect();
    let log = admin.log_page(5, 0, 4096, true).expect_ok();
    let effects = |table: usize, opcode: usize| {
        u32::from_le_bytes(log[table * 1024 + opcode * 4..][..4].try_into().unwrap())
    };
    for opcode in 0..=255u8 {
        let found = effects(1, opcode.into());
        // Fabrics commands have their own rules.
        if opcode != FABRICS {
            let completion = io.command(Sqe::rw(opcode, 1, u64::MAX, 0).sgl(TRANSPORT, 0), &[]);
            assert_eq!(found & 1 == 0, completion.code() == 0x001, "I/O {opcode:#x}: {found:#x}");
        }
        let changes = matches!(opcode, 0x01 | 0x08 | 0x09 | 0x19);
        if changes || matches!(opcode, 0x00 | 0x02 | 0x05 | 0x0C) {
            assert_eq!(
                found,
                if changes { 0b11 } else { 0b01 },
                "I/O {opcode:#x}: CSUPP, LBCC and nothing else"
            );
        }
        // An Asynchronous Event Request is not answered.
        if !matches!(opcode, FABRICS | 0x0C) {
            let completion = admin.command(Sqe::new(opcode, 0xFFFF_FFF0), &[]);
            assert_eq!(effects(0, opcode.into()) & 1 == 0, completion.code() == 0x001, "admin {opcode:#x}");
        }
    }
    let id = admin.identify(1, 0).expect_ok();
    let oncs = u16::from_le_bytes([id[520], id[521]]);
    for (bit, opcode) in [(0, 0x05), (1, 0x04), (2, 0x09), (3, 0x08), (5, 0x0D), (7, 0x0C), (8, 0x19)] {
        assert_eq!(oncs >> bit & 1 == 1, effects(1, opcode) & 1 == 1, "ONCS bit {bit}");
    }
    assert_eq!((id[522], id[523]), (1, 0), "FUSES: Compare and Write");
    assert_eq!((id[532], id[533]), (0, 0), "ACWU: one block");
    assert_eq!((id[534], id[535]), (3, 0), "OCFS: formats 0 and 1");
    rig.check_health();
}

#[test]
fn our_own_initiator_compares_verifies_and_copies() {
    let rig = Rig::start();
    let options = ControllerOptions::new(uuid::Uuid::from_bytes([9; 16]));
    let host = blocking::connect(rig.addr, SUBNQN, &options).unwrap();
    let ns = blocking::now(host.namespace(1)).unwrap();
    let data = pattern(64 << 10, 1);
    blocking::now(host.write(&ns, 0, data.clone(), false)).unwrap();
    blocking::now(host.copy(&ns, &[(8, 8), (0, 8)], 100, true)).unwrap();
    let copied = [&data[8 * 4096..], &data[..8 * 4096]].concat();
    blocking::now(host.compare(&ns, 100, copied)).unwrap();
    let refused = |result: Result<(), HostError>, wanted: Status| {
        assert!(matches!(result, Err(HostError::Status { status, .. }) if status.is(wanted)), "{result:?}");
    };
    refused(blocking::now(host.compare(&ns, 100, data)), Status::COMPARE_FAILURE);
    blocking::now(host.verify(&ns, 0, BLOCKS as u32)).unwrap();
    refused(blocking::now(host.verify(&ns, BLOCKS, 1)), Status::LBA_OUT_OF_RANGE);
    refused(blocking::now(host.copy(&ns, &[(0, 257)], 300, false)), Status::COMMAND_SIZE_LIMIT_EXCEEDED);
    for (ranges, what) in [(vec![], "none"), (vec![(0, 0)], "empty"), (vec![(0, 1); 257], "too many")] {
        let result = blocking::now(host.copy(&ns, &ranges, 0, false));
        assert!(matches!(result, Err(HostError::Invalid { .. })), "{what}");
    }
}
