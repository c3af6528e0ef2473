//! The volatile write cache: whom it is shown to, what switching it off means, and how many flushes reach the device.

use rimrock::device::{SimDisks, SimSpec};
use rimrock::pool::{Pool, PoolManager, PoolOptions, VolumeSpec};
use rimrock::reactor::block_on;
use rimrock::target::{Backend, NamespaceSpec};

use super::client::*;

const VOLATILE_WRITE_CACHE: u8 = 0x06;
const FLUSH: u8 = 0x00;
const KIB: usize = 1 << 10;

/// A rig on a file, which has a cache.
fn cached_rig() -> (Rig, tempfile::TempDir) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let rig = Rig::with_device(&format!("uring:{}?size=64MiB", directory.path().join("disk.img").display()));
    (rig, directory)
}

fn device_flushes(rig: &Rig) -> u64 {
    rig.target.subsystem(SUBNQN).unwrap().namespaces[0].flushes
}

/// How many flushes of the device a write of each kind costs: in the capsule, asked for, and of zeros.
fn flushes_of_writes(rig: &Rig, io: &mut Wire) -> [u64; 3] {
    let mut before = device_flushes(rig);
    [0, 1, 2].map(|kind| {
        match kind {
            0 => assert!(io.write(1, 0, &pattern(4 * KIB, 1)).ok()),
            1 => assert!(io.write(1, 8, &pattern(64 * KIB, 2)).ok()),
            _ => assert!(io.command(Sqe::rw(8, 1, 4, 3), &[]).ok()),
        }
        let now = device_flushes(rig);
        now - std::mem::replace(&mut before, now)
    })
}

#[test]
fn a_cache_that_is_switched_off_is_emptied_and_holds_nothing_from_then_on() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    let (mut other_admin, mut other) = rig.connect_as(OTHER_HOST, 32);
    for admin in [&mut admin, &mut other_admin] {
        assert_eq!(admin.identify(1, 0).expect_ok()[525] & 1, 1, "VWC is present");
        assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 1, "WCE is the default");
    }
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    let before = device_flushes(&rig);
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    assert_eq!(device_flushes(&rig) - before, 1, "what was cached is durable");
    assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 0);
    assert_eq!(flushes_of_writes(&rig, &mut io), [1, 1, 1]);
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    assert_eq!(device_flushes(&rig) - before, 4, "it was off already");
    // It is this controller's setting.
    assert_eq!(other_admin.get_feature(VOLATILE_WRITE_CACHE).result, 1);
    assert_eq!(flushes_of_writes(&rig, &mut other), [0, 0, 0]);
    admin.set_feature(VOLATILE_WRITE_CACHE, 1).expect_ok();
    assert_eq!(admin.get_feature(VOLATILE_WRITE_CACHE).result, 1);
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    // A controller begins anew.
    admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    drop((admin, io));
    assert_eq!(rig.admin().get_feature(VOLATILE_WRITE_CACHE).result, 1);
    rig.check_health();
}

#[test]
fn a_host_that_never_asked_about_a_cache_has_none() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    assert_eq!(flushes_of_writes(&rig, &mut io), [1, 1, 1]);
    // Told of it, it flushes when it wants to.
    admin.identify(1, 0).expect_ok();
    assert_eq!(flushes_of_writes(&rig, &mut io), [0, 0, 0]);
    let fua = Sqe::rw(1, 1, 0, 0).dword(12, 1 << 30).sgl(IN_CAPSULE, 4096);
    let before = device_flushes(&rig);
    assert!(io.command(fua, &pattern(4096, 3)).ok());
    assert_eq!(device_flushes(&rig) - before, 1, "FUA");
}

#[test]
fn writes_that_run_while_the_cache_is_switched_off_are_answered_when_they_are_durable() {
    let (rig, _directory) = cached_rig();
    let (mut admin, mut io) = rig.connect();
    admin.identify(1, 0).expect_ok();
    for round in 0..20u8 {
        admin.set_feature(VOLATILE_WRITE_CACHE, 1).expect_ok();
        let before = device_flushes(&rig);
        let mut bytes = Vec::new();
        for i in 0..64u16 {
            let sqe = Sqe::rw(1, 1, u64::from(i), 0).sgl(IN_CAPSULE, 4096).cid(i);
            bytes.extend(io.pdu(4, 0, &sqe.0, &pattern(4096, round)));
        }
        io.send(&bytes);
        admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
        for _ in 0..64 {
            assert!(io.complete(&[]).ok());
        }
        let flushes = device_flushes(&rig) - before;
        assert!((1..=65).contains(&flushes), "round {round}: {flushes} flushes");
    }
    rig.check_health();
}

#[test]
fn many_flushes_at_once_are_few_for_the_device() {
    let (rig, _directory) = cached_rig();
    let admin = rig.admin();
    let mut queues = [1, 2].map(|qid| {
        let mut io = rig.wire();
        io.connect_io(&admin, HOSTNQN, qid, 128).expect_ok();
        io
    });
    for nsid in [1, 0xFFFF_FFFF] {
        let before = device_flushes(&rig);
        for io in &mut queues {
            let flush = |cid| io.pdu(4, 0, &Sqe::new(FLUSH, nsid).cid(cid).0, &[]);
            let bytes: Vec<u8> = (0..100).flat_map(flush).collect();
            io.send(&bytes);
        }
        for io in &mut queues {
            for _ in 0..100 {
                assert!(io.complete(&[]).ok());
            }
        }
        let flushes = device_flushes(&rig) - before;
        assert!((1..=10).contains(&flushes), "{flushes} flushes of the device for 200 of its hosts");
    }
    rig.check_health();
}

// ---- power cuts ----------------------------------------------------------------------------------------------------

const BLOCKS: u64 = 256;

/// What a host has done about the cache before it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Caching {
    /// Asked, and left on.
    On,
    NeverAsked,
    Off,
    /// Switched off while the writes are under way.
    OffMeanwhile,
}

/// A pool of simulated disks with volume `v`, made or found.
async fn pool_on(manager: PoolManager, disks: SimDisks, is_new: bool) -> std::sync::Arc<Pool> {
    if !is_new {
        return manager.import(disks.open()).await.unwrap();
    }
    let pool = manager.create("pool", disks.open(), PoolOptions::default()).await.unwrap();
    let spec =
        VolumeSpec { name: "v".into(), size: 64 << 20, block_size: 4096, write_cache: true, uuid: None };
    pool.volume_create(spec).await.unwrap();
    pool
}

/// A rig whose namespace 2 lies on simulated disks.
fn rig_on(disks: &SimDisks, on_volume: bool, is_new: bool) -> Rig {
    let rig = Rig::start();
    let backend = match on_volume {
        false => Backend::Device(disks.open().remove(0)),
        true => {
            let (manager, disks) = (PoolManager::new(rig.reactors(), 16 << 20), disks.clone());
            let opening = async move { pool_on(manager, disks, is_new).await.open("v").await.unwrap() };
            Backend::Volume(block_on(opening))
        }
    };
    assert_eq!(rig.target.add_namespace(SUBNQN, NamespaceSpec::new(backend, "sim")).unwrap(), 2);
    rig
}

/// Writes without a flush, cuts the power after the last answer, and counts the blocks that are not what was written.
fn lost_blocks(seed: u64, on_volume: bool, caching: Caching) -> usize {
    let spec = SimSpec {
        size: 128 << 20,
        write_cache: true,
        latency: caching == Caching::OffMeanwhile,
        slow_reads: false,
    };
    let disks = SimDisks::new(seed, vec![spec]);
    let rig = rig_on(&disks, on_volume, true);
    let (mut admin, mut io) = rig.connect_as(HOSTNQN, 512);
    if caching != Caching::NeverAsked {
        admin.identify(1, 0).expect_ok();
    }
    if caching == Caching::Off {
        admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    }
    let write = |i: u64| {
        let sqe = Sqe::rw(1, 2, i, 0).sgl(IN_CAPSULE, 4096).cid(i as u16);
        io.pdu(4, 0, &sqe.0, &pattern(4096, i as u8))
    };
    let bytes: Vec<u8> = (0..BLOCKS).flat_map(write).collect();
    io.send(&bytes);
    if caching == Caching::OffMeanwhile {
        admin.set_feature(VOLATILE_WRITE_CACHE, 0).expect_ok();
    }
    for _ in 0..BLOCKS {
        assert!(io.complete(&[]).ok());
    }
    // Nothing that stops in an orderly way has any effect from here on.
    disks.cut_after(Some(0));
    drop((admin, io, rig));
    disks.power_cycle();
    let rig = rig_on(&disks, on_volume, false);
    let (_admin, mut io) = rig.connect();
    let is_lost = |i: &u64| io.read(2, *i, 4096).expect_ok() != pattern(4096, *i as u8);
    (0..BLOCKS).filter(is_lost).count()
}

#[test]
fn what_was_answered_without_a_cache_survives_a_power_cut() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("SEED={seed}");
    for on_volume in [false, true] {
        assert!(lost_blocks(seed, on_volume, Caching::On) > 0, "the disks lose what is not flushed");
        for caching in [Caching::NeverAsked, Caching::Off, Caching::OffMeanwhile] {
            let lost = lost_blocks(seed, on_volume, caching);
            assert_eq!(lost, 0, "blocks lost with {caching:?}, on a volume: {on_volume}");
        }
    }
}
