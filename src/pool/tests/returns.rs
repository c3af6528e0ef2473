//! Space comes back: from metadata, from leaves that trims emptied, from ghosts, in a pool full to the brim, and past what
//! cannot be read. Checks and scrubs beside hosts stand in nobody's way.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::Duration;

use super::meeting::{disks_of, simulate};
use super::*;
use crate::device::IoError;
use crate::pool::damage::DamageState;
use crate::pool::{CheckOptions, Severity, Volume};

const MIB: u64 = 1 << 20;

/// Writes 256 KiB after 256 KiB until the pool is full. Bytes written.
async fn fill(volume: &Volume) -> u64 {
    let data = DmaBuf::copy_of(&pattern(1, 0, 256 << 10)).freeze();
    let mut at = 0;
    while volume.write(at, data.clone(), false).await.is_ok() {
        at += 256 << 10;
    }
    at
}

/// Writes one block of each MiB from chunk `from` on, up to `count` or until the pool is full. Blocks written.
async fn sprinkle(volume: &Volume, from: u64, count: u64) -> u64 {
    for chunk in 0..count {
        let at = (from + chunk) * MIB;
        if volume.write(at, DmaBuf::copy_of(&pattern(1, at, 4096)).freeze(), false).await.is_err() {
            return chunk;
        }
    }
    count
}

#[test]
fn regions_of_metadata_come_back_to_data() {
    run(async {
        let devices = [ram(128)];
        let (manager, pool) = pool_on(&devices).await;
        let mut first = None;
        for _ in 0..3 {
            pool.volume_create(spec("v", 1024)).await.unwrap();
            let went_in = fill(&pool.open("v").await.unwrap()).await;
            pool.delete("v").await.unwrap();
            deleted(&pool).await;
            let first = *first.get_or_insert(went_in);
            assert!(
                went_in * 10 >= first * 9,
                "{went_in} bytes went in; {first} before metadata had its turn"
            );
            pool.volume_create(spec("sparse", 1 << 20)).await.unwrap();
            assert!(sprinkle(&pool.open("sparse").await.unwrap(), 0, u64::MAX).await > 2000);
            pool.delete("sparse").await.unwrap();
            deleted(&pool).await;
            // Regions are given back after a commit.
            pool.verify().await.unwrap();
            crate::reactor::sleep(Duration::from_secs(5)).await;
        }
        assert_sound(&pool).await;
        drop(pool);
        manager.export("p").await.unwrap();
        let pool = manager.import(devices.to_vec()).await.unwrap();
        pool.volume_create(spec("v", 1024)).await.unwrap();
        assert!(fill(&pool.open("v").await.unwrap()).await * 10 >= first.unwrap() * 9);
        assert_sound(&pool).await;
    });
}

#[test]
fn a_leaf_that_trims_have_emptied_goes() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 1 << 20)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        pool.verify().await.unwrap();
        let before = pool.info().await.unwrap().metadata;
        for pass in 0..4 {
            assert_eq!(sprinkle(&v, pass * 1000, 1000).await, 1000, "pass {pass}");
            for chunk in pass * 1000..(pass + 1) * 1000 {
                v.deallocate(chunk * MIB, 4096).await.unwrap();
            }
            v.flush().await.unwrap();
        }
        pool.verify().await.unwrap();
        let after = pool.info().await.unwrap().metadata;
        assert!(after < before + MIB, "{before} bytes of metadata became {after}");
        // What was trimmed stays so after a crash.
        sprinkle(&v, 0, 50).await;
        v.flush().await.unwrap();
        for chunk in 0..50 {
            v.deallocate(chunk * MIB, 4096).await.unwrap();
        }
        v.flush().await.unwrap();
        let after = self::manager();
        let crashed = after.import(copy_of(&devices)).await.unwrap();
        assert_eq!(read(&crashed, "v", 7 * MIB, 4096).await, vec![0; 4096]);
        assert_eq!(crashed.open("v").await.unwrap().allocated(), 0);
        assert_sound(&crashed).await;
        drop(manager);
    });
}

#[test]
fn a_pool_full_of_metadata_can_always_be_emptied() {
    for shards in [1, 8] {
        run(async move {
            let devices = [ram(64)];
            let manager = manager();
            let options = PoolOptions { shards: Some(shards), ..PoolOptions::default() };
            let pool = manager.create("p", devices.to_vec(), options).await.unwrap();
            pool.volume_create(spec("v", 1 << 20)).await.unwrap();
            let v = pool.open("v").await.unwrap();
            let written = sprinkle(&v, 0, u64::MAX).await;
            v.flush().await.unwrap();
            pool.snapshot_create("v", "s").await.unwrap();
            // Trims change pages that the snapshot shares: they take metadata until they are refused.
            let mut trimmed = 0;
            while trimmed < written && v.deallocate(trimmed * MIB, 4096).await.is_ok() {
                trimmed += 1;
            }
            let _ = pool.resize("v", MIB, true).await;
            drop(v);
            pool.delete("v").await.unwrap();
            pool.delete("s").await.unwrap();
            for _ in 0..600 {
                if pool.info().await.unwrap().deleting == 0 {
                    break;
                }
                crate::reactor::sleep(Duration::from_millis(100)).await;
            }
            let info = pool.info().await.unwrap();
            assert_eq!(
                (info.deleting, info.allocated),
                (0, 0),
                "{shards} shards, {trimmed} of {written} trimmed"
            );
            pool.volume_create(spec("w", 64)).await.unwrap();
            write(&pool, "w", 0, &pattern(3, 0, 1 << 20)).await;
            assert_sound(&pool).await;
        });
    }
}

#[test]
fn a_page_lost_in_both_copies_stops_no_other_deletion() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
        pool.snapshot_create("v", "s").await.unwrap();
        write(&pool, "v", 0, &pattern(2, 0, 4 << 20)).await;
        pool.volume_create(spec("w", 8)).await.unwrap();
        write(&pool, "w", 0, &pattern(3, 0, 8 << 20)).await;
        drop(pool);
        manager.export("p").await.unwrap();
        let pool = manager.import(devices.to_vec()).await.unwrap();
        {
            let shard = crate::pool::local::shard(pool.key(), 0).unwrap();
            let (_, root) = shard.state.borrow().nodes.own_roots()[0];
            let twin = shard.state.borrow().space.twin(root.block()).unwrap();
            for block in [root.block(), twin] {
                devices[0].write(block.offset(), DmaBuf::zeroed(4096).freeze()).await.unwrap();
            }
        }
        pool.delete("s").await.unwrap();
        pool.delete("w").await.unwrap();
        for _ in 0..200 {
            if pool.info().await.unwrap().deleting == 0 {
                break;
            }
            crate::reactor::sleep(Duration::from_millis(50)).await;
        }
        let info = pool.info().await.unwrap();
        // What the lost page led to is nobody's now, until a check gives it back.
        assert_eq!(info.deleting, 0);
        assert!(info.allocated >= 4 * MIB && info.allocated <= 5 * MIB, "{} bytes", info.allocated);
        let repaired = pool.check(CheckOptions { data: false, repair: true }).await.unwrap();
        assert!(repaired.findings.iter().any(|finding| finding.repaired), "{repaired:?}");
        pool.verify().await.unwrap();
        assert_eq!(pool.info().await.unwrap().allocated, 4 * MIB);
        assert_eq!(read(&pool, "v", 0, 4 << 20).await, pattern(2, 0, 4 << 20));
    });
}

#[test]
fn what_ghosts_hold_for_nobody_comes_back_after_a_restart_too() {
    for restart in [false, true] {
        let disks = disks_of(3, 128);
        let opened = disks.open();
        simulate(3, &disks, async move {
            let (manager, mut pool) = pool_on(&opened).await;
            pool.volume_create(spec("v", 16)).await.unwrap();
            write(&pool, "v", 0, &pattern(1, 0, 16 << 20)).await;
            pool.snapshot_create("v", "g").await.unwrap();
            for name in ["c1", "c2"] {
                pool.clone_create("g", name).await.unwrap();
            }
            pool.delete("v").await.unwrap();
            pool.delete("g").await.unwrap();
            crate::reactor::sleep(Duration::from_secs(20)).await;
            for name in ["c1", "c2"] {
                write(&pool, name, 0, &pattern(5, 0, 16 << 20)).await;
            }
            if restart {
                drop(pool);
                manager.export("p").await.unwrap();
                pool = manager.import(opened.clone()).await.unwrap();
            }
            crate::reactor::sleep(Duration::from_secs(60)).await;
            pool.volume_create(spec("w", 1024)).await.unwrap();
            let w = pool.open("w").await.unwrap();
            fill(&w).await;
            // A full pool looks after what ghosts hold.
            crate::reactor::sleep(Duration::from_secs(120)).await;
            fill(&w).await;
            crate::reactor::sleep(Duration::from_secs(120)).await;
            let info = pool.info().await.unwrap();
            let named = 2 * 16 * MIB + w.allocated();
            assert_eq!(
                info.allocated,
                named,
                "restart {restart}: {} bytes are nobody's",
                info.allocated - named
            );
            for name in ["c1", "c2"] {
                assert_eq!(read(&pool, name, 0, 16 << 20).await, pattern(5, 0, 16 << 20));
            }
            assert_sound(&pool).await;
        });
    }
}

#[test]
fn what_is_void_in_a_ghost_is_not_taken_for_damage() {
    run(async {
        let devices = [ram(64)];
        let (_manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 1 << 20)).await;
        pool.snapshot_create("v", "a").await.unwrap();
        write(&pool, "v", 4 * MIB, &pattern(2, 0, 8192)).await;
        pool.snapshot_create("v", "b").await.unwrap();
        for name in ["c1", "c2"] {
            pool.clone_create("b", name).await.unwrap();
        }
        pool.delete("b").await.unwrap();
        deleted(&pool).await;
        for (i, name) in ["v", "c1", "c2"].into_iter().enumerate() {
            write(&pool, name, 0, &pattern(10 + i as u64, 0, 1 << 20)).await;
        }
        pool.verify().await.unwrap();
        pool.delete("a").await.unwrap();
        deleted(&pool).await;
        // The blocks that the ghost's void pointers name are used for something else.
        for i in 0..300u64 {
            write(&pool, "v", (8 + 4 * (i % 2)) * MIB, &pattern(i, 0, 4096)).await;
            pool.verify().await.unwrap();
        }
        let report = pool.check(CheckOptions { data: true, repair: false }).await.unwrap();
        let wrong: Vec<_> = report.findings.iter().filter(|found| found.severity > Severity::Note).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        let image = devices[0].image().unwrap();
        let block = pattern(10, 0, 1 << 20);
        let at = image.chunks(4096).position(|found| *found == block[..4096]).unwrap() as u64 * 4096;
        devices[0].write(at, DmaBuf::zeroed(4096).freeze()).await.unwrap();
        let v = pool.open("v").await.unwrap();
        assert!(matches!(v.read(0, DmaBuf::uninit(4096)).await.0, Err(IoError::Unrecovered { .. })));
        let damage = pool.damage().await.unwrap();
        assert_eq!(damage.len(), 1, "{damage:?}");
        assert_eq!(damage[0].state, DamageState::Lost);
        assert_eq!(damage[0].extents.iter().map(|extent| extent.name.as_str()).collect::<Vec<_>>(), ["v"]);
    });
}

#[test]
fn a_scrub_started_twice_is_one_that_stops() {
    let disks = disks_of(3, 64);
    let (opened, watched) = (disks.open(), disks.clone());
    simulate(3, &disks, async move {
        let (_manager, pool) = pool_on(&opened).await;
        pool.volume_create(spec("v", 64)).await.unwrap();
        for at in 0..20u64 {
            write(&pool, "v", at * MIB, &pattern(1, 0, 1 << 20)).await;
        }
        pool.verify().await.unwrap();
        crate::reactor::sleep(Duration::from_secs(10)).await;
        let starts = (0..2).map(|_| pool.scrub_start(Some(1 << 20), false));
        for started in crate::pool::join::all(starts).await {
            started.unwrap();
        }
        crate::reactor::sleep(Duration::from_secs(1)).await;
        pool.scrub_stop().await.unwrap();
        let before = watched.operations();
        crate::reactor::sleep(Duration::from_secs(6)).await;
        assert_eq!(watched.operations(), before);
    });
}

#[test]
fn a_check_of_all_data_holds_no_write_back() {
    let disks = disks_of(7, 128);
    let opened = disks.open();
    simulate(7, &disks, async move {
        let (_manager, pool) = pool_on(&opened).await;
        pool.volume_create(spec("v", 1024)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        let piece = DmaBuf::copy_of(&pattern(1, 0, 256 << 10)).freeze();
        let mut end = 0;
        while pool.info().await.unwrap().free > 30 * MIB {
            v.write(end, piece.clone(), false).await.unwrap();
            end += 256 << 10;
        }
        v.flush().await.unwrap();
        let done = Rc::new(Cell::new(false));
        let (told, checked) = (Rc::clone(&done), std::sync::Arc::clone(&pool));
        crate::reactor::spawn(async move {
            let report = checked.check(CheckOptions { data: true, repair: false }).await.unwrap();
            assert!(report.findings.iter().all(|found| found.severity == Severity::Note), "{report:?}");
            told.set(true);
        });
        let mut round = 0;
        while !done.get() {
            let start = crate::reactor::now();
            v.write(round * (256 << 10) % end, piece.clone(), false).await.unwrap();
            let took = crate::reactor::now() - start;
            // The disk itself stops for up to 4.5 seconds now and then, some operations of a write one after the other.
            assert!(took < Duration::from_secs(15), "a write took {took:?}");
            round += 1;
        }
        assert!(round > 100, "only {round} writes met the check");
    });
}
