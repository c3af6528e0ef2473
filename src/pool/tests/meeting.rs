//! Operations that meet each other, on simulated disks that take their time: deleting and opening, growing and writing,
//! closing and everything in the background.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::time::Duration;

use super::*;
use crate::device::{IoError, SimDisks, SimSpec};
use crate::pool::PoolErrorKind;
use crate::pool::label::Geometry;
use crate::reactor::SimReactors;

const MIB: u64 = 1 << 20;

/// One disk of 64 MiB.
fn disks(seed: u64) -> SimDisks {
    disks_of(seed, 64)
}

pub(super) fn disks_of(seed: u64, mib: u64) -> SimDisks {
    SimDisks::new(
        seed,
        vec![SimSpec { size: mib << 20, write_cache: true, latency: true, slow_reads: false }],
    )
}

/// Runs a test on one simulated reactor to its end.
pub(super) fn simulate(seed: u64, disks: &SimDisks, task: impl Future<Output = ()> + 'static) {
    let mut reactors = SimReactors::new(1, seed);
    let ended = Rc::new(Cell::new(false));
    let end = Rc::clone(&ended);
    reactors.spawn(0, async move {
        task.await;
        end.set(true);
    });
    let mut random = Random(seed | 1);
    while !ended.get() && !disks.is_cut() {
        let moved = reactors.step(|count| random.next(count as u64) as usize) || reactors.advance();
        assert!(moved, "seed {seed}: it stands still");
    }
    drop(reactors);
    crate::pool::forget_all();
}

#[test]
fn a_snapshot_opened_while_it_is_deleted_never_gives_other_data() {
    for seed in 0..60 {
        let disks = disks(seed);
        let opened = disks.open();
        simulate(seed, &disks, async move {
            let (_manager, pool) = pool_on(&opened).await;
            pool.volume_create(spec("v", 4)).await.unwrap();
            write(&pool, "v", 0, &pattern(9, 0, 4 << 20)).await;
            pool.snapshot_create("v", "base").await.unwrap();
            write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
            pool.snapshot_create("v", "s").await.unwrap();
            write(&pool, "v", 0, &pattern(2, 0, 4 << 20)).await;
            let deleting = std::sync::Arc::clone(&pool);
            let refused = Rc::new(Cell::new(false));
            let told = Rc::clone(&refused);
            crate::reactor::spawn(async move { told.set(deleting.delete("s").await.is_err()) });
            let mut handle = None;
            for _ in 0..seed % 7 {
                crate::reactor::yield_now().await;
            }
            for _ in 0..3 {
                crate::reactor::yield_now().await;
                handle = handle.or(pool.open("s").await.ok());
            }
            // Opened before, it is in use, and not deleted; opened meanwhile, it ends with the deletion.
            let Some(handle) = handle else { return };
            let want = pattern(1, 0, 4096);
            let mut gone = false;
            for _ in 0..100 {
                let (result, bytes) = handle.read(0, DmaBuf::uninit(4096)).await;
                match result {
                    Ok(()) => assert!(!gone && bytes[..] == want[..], "seed {seed}: other data"),
                    Err(error) => {
                        assert_eq!(error, IoError::Gone, "seed {seed}");
                        gone = true;
                    }
                }
                crate::reactor::sleep(Duration::from_millis(1)).await;
            }
            assert!(gone != refused.get(), "seed {seed}: deleted, or in use");
        });
    }
}

#[test]
fn a_write_beyond_the_old_end_is_refused_until_the_volume_has_grown() {
    for seed in 0..20 {
        let disks = disks(seed);
        let opened = disks.open();
        simulate(seed, &disks, async move {
            let (_manager, pool) = pool_on(&opened).await;
            pool.volume_create(spec("v", 64)).await.unwrap();
            for at in 0..16u64 {
                write(&pool, "v", at * 4 * MIB, &pattern(1, 0, 4096)).await;
            }
            pool.resize("v", MIB, true).await.unwrap();
            let v = pool.open("v").await.unwrap();
            let growing = std::sync::Arc::clone(&pool);
            let done = Rc::new(Cell::new(false));
            let end = Rc::clone(&done);
            crate::reactor::spawn(async move {
                growing.resize("v", 64 * MIB, false).await.unwrap();
                end.set(true);
            });
            let bytes = pattern(seed, 1, 4096);
            let mut acknowledged = false;
            while !acknowledged {
                acknowledged = v.write(40 * MIB, DmaBuf::copy_of(&bytes).freeze(), true).await.is_ok();
                crate::reactor::sleep(Duration::from_micros(5)).await;
            }
            while !done.get() {
                crate::reactor::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(read(&pool, "v", 40 * MIB, 4096).await, bytes, "seed {seed}");
            assert_eq!(read(&pool, "v", 36 * MIB, 4096).await, vec![0; 4096], "seed {seed}");
        });
    }
}

#[test]
fn after_an_export_the_devices_are_left_alone() {
    for seed in 0..60 {
        let disks = disks(seed);
        let (opened, watched) = (disks.open(), disks.clone());
        simulate(seed, &disks, async move {
            let mut random = Random(seed | 1);
            let (manager, mut pool) = pool_on(&opened).await;
            pool.volume_create(spec("v", 4)).await.unwrap();
            for round in 0..6 {
                let name = format!("s{round}");
                write(&pool, "v", 0, &pattern(round, 0, 64 << 10)).await;
                pool.snapshot_create("v", &name).await.unwrap();
                pool.delete(&name).await.unwrap();
                crate::reactor::sleep(Duration::from_micros(random.next(3000))).await;
                manager.export("p").await.unwrap();
                let before = watched.operations();
                crate::reactor::sleep(Duration::from_secs(20)).await;
                assert_eq!(watched.operations(), before, "seed {seed}, round {round}");
                pool = manager.import(opened.clone()).await.unwrap();
                assert_eq!(read(&pool, "v", 0, 64 << 10).await, pattern(round, 0, 64 << 10));
                assert_sound(&pool).await;
            }
        });
    }
}

#[test]
fn a_file_system_without_room_stops_writes_alone_and_only_for_a_while() {
    for seed in 0..10 {
        let disks = disks(seed);
        let (opened, watched) = (disks.open(), disks.clone());
        let regions = Geometry::choose(64 << 20, 64 << 20, 4, None).region(0) * 4096;
        simulate(seed, &disks, async move {
            let (manager, pool) = pool_on(&opened).await;
            pool.volume_create(spec("v", 256)).await.unwrap();
            write(&pool, "v", 0, &pattern(1, 0, 4 << 20)).await;
            let v = pool.open("v").await.unwrap();
            v.flush().await.unwrap();
            watched.set_full(Some(regions));
            // New blocks find no room; nothing of what is there is lost, and commits wait.
            let mut refused = 0;
            for at in 0..40u64 {
                let data = DmaBuf::copy_of(&pattern(2, at, 4096)).freeze();
                match v.write((8 + at) * MIB, data, false).await {
                    Ok(()) => {}
                    Err(error) => {
                        assert_eq!(error, IoError::CapacityExceeded);
                        refused += 1;
                    }
                }
            }
            assert!(refused > 0, "seed {seed}: it never was full");
            for _ in 0..20 {
                crate::reactor::sleep(Duration::from_secs(1)).await;
                assert_eq!(read(&pool, "v", 0, 1 << 20).await, pattern(1, 0, 1 << 20));
            }
            watched.set_full(None);
            crate::reactor::sleep(Duration::from_secs(30)).await;
            write(&pool, "v", 100 * MIB, &pattern(3, 0, 1 << 20)).await;
            v.flush().await.unwrap();
            drop(v);
            manager.export("p").await.unwrap();
            let pool = manager.import(opened.clone()).await.unwrap();
            assert_eq!(read(&pool, "v", 0, 4 << 20).await, pattern(1, 0, 4 << 20));
            assert_eq!(read(&pool, "v", 100 * MIB, 1 << 20).await, pattern(3, 0, 1 << 20));
            assert_sound(&pool).await;
        });
    }
}

#[test]
fn a_group_cannot_name_a_volume_twice_whatever_it_is_called() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        let v = pool.volume_create(spec("v", 4)).await.unwrap();
        let pairs = vec![("v".to_owned(), "a".to_owned()), (v.uuid.to_string(), "b".to_owned())];
        assert_eq!(pool.snapshot_group(pairs).await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_eq!(pool.nodes().await.unwrap().len(), 1);
        assert_sound(&pool).await;
    });
}

#[test]
fn a_name_cannot_be_anothers_uuid() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        let precious = pool.volume_create(spec("precious", 4)).await.unwrap();
        let refused = pool.volume_create(spec(&precious.uuid.to_string(), 4)).await.unwrap_err();
        assert_eq!(refused.kind, PoolErrorKind::Invalid);
        assert!(pool.rename("precious", &precious.uuid.simple().to_string()).await.is_err());
    });
}

#[test]
fn what_is_pinned_is_neither_shrunk_nor_destroyed() {
    run(async {
        let (manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        pool.pin("v", "production", None).await.unwrap();
        assert_eq!(pool.resize("v", MIB, true).await.unwrap_err().kind, PoolErrorKind::Busy);
        let refused = manager.destroy("p").await.unwrap_err();
        assert!(refused.text.contains("production"), "{refused}");
        pool.unpin("v", "production").await.unwrap();
        pool.resize("v", MIB, true).await.unwrap();
        manager.destroy("p").await.unwrap();
    });
}
