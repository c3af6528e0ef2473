//! Namespaces on volumes and snapshots of a pool.

use rimrock::device::{Device, OpenOptions};
use rimrock::pool::{PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec};

use crate::client::*;

const MIB: u64 = 1 << 20;

fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

/// NSZE and NUSE.
fn use_of(admin: &mut Wire, nsid: u32) -> (u64, u64) {
    let id = admin.identify(0, nsid).expect_ok();
    assert_eq!(id[24] & 1, 1, "THINP");
    assert_eq!(id[..8], id[8..16], "NCAP");
    (le(&id[..8]), le(&id[16..24]))
}

#[test]
fn a_thin_volume_shows_its_use_and_its_snapshot_stays_as_it_was() {
    let rig = Rig::start();
    let manager = PoolManager::new(rig.reactors(), 64 << 20);
    let device = Device::open("ram:256MiB", OpenOptions::default()).unwrap();
    let (pool, volume) = block_on(async move {
        let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
        let spec =
            VolumeSpec { name: "v".into(), size: 1024 * MIB, block_size: 512, write_cache: true, uuid: None };
        pool.volume_create(spec).await.unwrap();
        let volume = pool.open("v").await.unwrap();
        (pool, volume)
    });
    // Growing is announced also to those who know the volume by another UUID.
    let mut spec = NamespaceSpec::new(Backend::Volume(volume), "pool/v");
    spec.uuid = Some(uuid::Uuid::from_bytes([9; 16]));
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    let (mut admin, mut io) = rig.connect();
    assert_eq!(admin.identify(1, 0).expect_ok()[525] & 1, 1, "VWC: the volume has a write cache");
    assert_eq!(use_of(&mut admin, 2), (2 * 1024 * 1024, 0), "blocks of 512 bytes, none used");
    let old = pattern(MIB as usize, 1);
    let write = |io: &mut Wire, slba: u64, data: &[u8]| {
        io.submit(Sqe::rw(1, 2, slba, (data.len() / 512) as u32 - 1).sgl(TRANSPORT, data.len() as u32), &[]);
        io.complete(data)
    };
    let read = |io: &mut Wire, nsid: u32, slba: u64, len: u32| {
        io.get(Sqe::rw(2, nsid, slba, len / 512 - 1), len).expect_ok()
    };
    for mib in 0..4 {
        assert!(write(&mut io, mib * 2048, &old).ok());
    }
    assert!(io.command(Sqe::new(0, 2), &[]).ok(), "flush");
    assert_eq!(use_of(&mut admin, 2).1, 4 * 2048);
    let snapshot = {
        let pool = pool.clone();
        block_on(async move {
            pool.snapshot_create("v", "v@1").await.unwrap();
            pool.open("v@1").await.unwrap()
        })
    };
    let spec = NamespaceSpec::new(Backend::Volume(snapshot), "pool/v@1");
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 3);
    assert_eq!(admin.identify(0, 3).expect_ok()[99], 1, "write protected");
    assert_ne!(admin.identify(3, 2).expect_ok(), admin.identify(3, 3).expect_ok(), "an identity of its own");
    // A single 512 byte block changes; its neighbours within the 4 KiB block do not.
    let new = pattern(512, 99);
    assert!(io.command(Sqe::rw(1, 2, 3, 0).sgl(IN_CAPSULE, 512), &new).ok());
    let got = read(&mut io, 2, 0, 4096);
    assert_eq!((&got[..1536], &got[1536..2048], &got[2048..]), (&old[..1536], &new[..], &old[2048..4096]));
    assert_eq!(read(&mut io, 3, 0, MIB as u32), old);
    io.command(Sqe::rw(1, 3, 0, 0).sgl(IN_CAPSULE, 512), &new).expect_refused(0x020);
    io.command(Sqe::rw(8, 3, 0, 0), &[]).expect_refused(0x020);
    // Space comes back.
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&(4 * 2048u32).to_le_bytes());
    assert!(io.command(Sqe::new(9, 2).dword(11, 4).sgl(IN_CAPSULE, 16), &range).ok());
    assert_eq!(use_of(&mut admin, 2).1, 0);
    assert!(read(&mut io, 2, 0, MIB as u32).iter().all(|&b| b == 0));
    assert_eq!(read(&mut io, 3, 2048, MIB as u32), old);
    // Growing is announced.
    assert!(admin.set_feature(0x0B, 0x100).ok());
    admin.log_page(4, 0, 4096, false).expect_ok();
    admin.submit(Sqe::new(0x0C, 0), &[]);
    let uuid = {
        let pool = pool.clone();
        block_on(async move { pool.resize("v", 2048 * MIB, false).await.unwrap().uuid })
    };
    assert_eq!(rig.target.namespace_resized(uuid), 1);
    assert_eq!(admin.complete(&[]).result, 0x0004_0002);
    assert_eq!(use_of(&mut admin, 2).0, 4 * 1024 * 1024);
    assert!(write(&mut io, 4 * 1024 * 1024 - 2048, &old).ok());
    rig.check_health();
}

/// A rig whose namespace 2 is a thin volume of `size` bytes, in blocks of 512.
fn volume_rig(size: u64) -> Rig {
    let rig = Rig::start();
    let manager = PoolManager::new(rig.reactors(), 64 << 20);
    let device = Device::open("ram:256MiB", OpenOptions::default()).unwrap();
    let volume = block_on(async move {
        let pool = manager.create("pool", vec![device], PoolOptions::default()).await.unwrap();
        let spec = VolumeSpec { name: "v".into(), size, block_size: 512, write_cache: true, uuid: None };
        pool.volume_create(spec).await.unwrap();
        pool.open("v").await.unwrap()
    });
    let spec = NamespaceSpec::new(Backend::Volume(volume), "pool/v");
    assert_eq!(rig.target.add_namespace(SUBNQN, spec).unwrap(), 2);
    rig
}

/// Dataset Management of one range of namespace 2, and its data.
fn deallocation(slba: u64, blocks: u32) -> (Sqe, [u8; 16]) {
    let mut range = [0; 16];
    range[4..8].copy_from_slice(&blocks.to_le_bytes());
    range[8..].copy_from_slice(&slba.to_le_bytes());
    (Sqe::new(9, 2).dword(11, 4).sgl(IN_CAPSULE, 16), range)
}

#[test]
fn a_write_holds_while_the_rest_of_its_block_is_zeroed_and_its_neighbours_are_deallocated() {
    let rig = volume_rig(64 * MIB);
    let admin = rig.admin();
    let [mut writer, mut trimmer] = [1, 2].map(|qid| {
        let mut io = rig.wire();
        io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
        io
    });
    for round in 0..2000_u64 {
        let slba = (round % 16 * 3 + 1) * 8;
        let old = pattern(3 * 4096, 1);
        let around = Sqe::rw(1, 2, slba - 8, 23).sgl(TRANSPORT, 3 * 4096);
        writer.submit(around, &[]);
        assert!(writer.complete(&old).ok());
        let data = pattern(512, round as u8);
        writer.submit(Sqe::rw(1, 2, slba + 3, 0).sgl(IN_CAPSULE, 512), &data);
        trimmer.submit(Sqe::rw(8, 2, slba, 2), &[]);
        trimmer.submit(Sqe::rw(8, 2, slba + 4, 3), &[]);
        // Whole blocks on both sides, and parts of this one, which stay as they are.
        for (first, blocks) in [(slba - 8, 11), (slba + 4, 12)] {
            let (sqe, range) = deallocation(first, blocks);
            trimmer.submit(sqe, &range);
        }
        assert!(writer.complete(&[]).ok());
        for _ in 0..4 {
            assert!(trimmer.complete(&[]).ok());
        }
        let got = writer.get(Sqe::rw(2, 2, slba - 8, 23), 3 * 4096).expect_ok();
        let at = 4096 + 3 * 512;
        assert!(got[at..at + 512] == data, "round {round}: the write is lost");
        assert!(got[..at].iter().chain(&got[at + 512..]).all(|&byte| byte == 0), "round {round}");
    }
}

#[test]
fn deallocations_are_not_cut_to_32_bits_and_keep_their_neighbours() {
    const BLOCKS: u64 = 4 << 31;
    let rig = volume_rig(BLOCKS * 512);
    let (_admin, mut io) = rig.connect();
    let old = pattern(4096, 1);
    let places = [0, 0xFFFF_FFF8, BLOCKS - 8];
    for slba in places {
        assert!(io.command(Sqe::rw(1, 2, slba, 7).sgl(IN_CAPSULE, 4096), &old).ok());
    }
    let (sqe, range) = deallocation(0, 0xFFFF_FFFF);
    assert!(io.command(sqe, &range).ok());
    let mut read = |slba| io.get(Sqe::rw(2, 2, slba, 7), 4096).expect_ok();
    assert!(read(0).iter().all(|&byte| byte == 0));
    assert_eq!(read(0xFFFF_FFF8), old, "a block of the volume that is only in part within stays as it is");
    assert_eq!(read(BLOCKS - 8), old);
    for (slba, blocks) in [(BLOCKS - 8, 9), (u64::MAX, 1), (BLOCKS - 1, u32::MAX)] {
        let (sqe, range) = deallocation(slba, blocks);
        io.command(sqe, &range).expect_refused(0x080);
    }
    assert_eq!(io.get(Sqe::rw(2, 2, BLOCKS - 8, 7), 4096).expect_ok(), old);
    let (sqe, range) = deallocation(5, 0);
    assert!(io.command(sqe, &range).ok());
}
