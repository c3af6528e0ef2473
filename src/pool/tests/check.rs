//! What is damaged on purpose is found, named, repaired where it can be, and never dropped.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use super::*;
use crate::device::IoError;
use crate::pool::{CheckReport, DamageState, Kind, Severity, check_devices};

const MIB: u64 = 1 << 20;

/// A pool with snapshots and a clone, closed, and what its volumes hold.
async fn sample(count: usize) -> (Vec<Device>, Vec<(&'static str, Vec<u8>)>) {
    let devices: Vec<Device> = (0..count).map(|_| ram(64)).collect();
    let (manager, pool) = pool_on(&devices).await;
    pool.volume_create(spec("v", 16)).await.unwrap();
    write(&pool, "v", 0, &pattern(1, 0, 6 << 20)).await;
    pool.snapshot_create("v", "v@1").await.unwrap();
    write(&pool, "v", 3 << 20, &pattern(2, 0, 6 << 20)).await;
    pool.clone_create("v@1", "c").await.unwrap();
    write(&pool, "c", MIB, &pattern(3, 0, 2 << 20)).await;
    let mut held = Vec::new();
    for name in ["v", "v@1", "c"] {
        held.push((name, read(&pool, name, 0, 16 << 20).await));
    }
    manager.export("p").await.unwrap();
    (devices, held)
}

async fn check(devices: &[Device], repair: bool) -> CheckReport {
    check_devices(devices.to_vec(), CheckOptions { repair, data: true }).await.unwrap()
}

async fn assert_holds(devices: &[Device], held: &[(&'static str, Vec<u8>)]) {
    let manager = manager();
    let pool = manager.import(devices.to_vec()).await.unwrap();
    for (name, bytes) in held {
        assert!(read(&pool, name, 0, 16 << 20).await == *bytes, "{name} changed");
    }
    assert_sound(&pool).await;
    assert_eq!(pool.info().await.unwrap().damage, Vec::<String>::new());
    manager.shut(&pool).await.unwrap();
}

async fn spoil(device: &Device, offset: u64) {
    let (result, mut bytes) = device.read(offset / 4096 * 4096, DmaBuf::uninit(4096)).await;
    result.unwrap();
    bytes[(offset % 4096) as usize] ^= 0x10;
    device.write(offset / 4096 * 4096, bytes.freeze()).await.unwrap();
}

/// The places in use of each kind, as (device, byte).
async fn places(devices: &[Device]) -> BTreeSet<(usize, u64)> {
    let manager = Rc::new(manager());
    let devices = copy_of(devices);
    let pool = manager.import(devices.clone()).await.unwrap();
    let home = crate::pool::lifecycle::home(pool.key()).unwrap();
    let mut places = BTreeSet::new();
    for shard in 0..4 {
        let shard = crate::pool::local::shard(pool.key(), shard).unwrap();
        places.extend(shard.live_metadata().await.into_iter().map(|block| (block.vdev(), block.offset())));
    }
    drop(home);
    manager.shut(&pool).await.unwrap();
    places
}

#[test]
fn a_closed_pool_is_proved_and_nothing_is_written() {
    run(async {
        for count in [1, 2] {
            let (devices, held) = sample(count).await;
            let before: Vec<_> = devices.iter().map(|device| device.image()).collect();
            let report = check(&devices, false).await;
            assert!(report.clean && report.findings.is_empty(), "{:#?}", report.findings);
            assert_eq!(report.named_blocks, (6 + 6 + 2) * 256);
            assert_eq!(report.data_blocks, report.named_blocks);
            assert!(devices.iter().map(|device| device.image()).eq(before));
            assert_holds(&devices, &held).await;
        }
    });
}

#[test]
fn each_copy_of_metadata_is_found_and_written_again() {
    run(async {
        let (devices, held) = sample(2).await;
        let all = places(&devices).await;
        assert!(all.len() > 40);
        let mut named = 0;
        for (at, (vdev, offset)) in all.iter().enumerate().step_by(5) {
            let bad = copy_of(&devices);
            spoil(&bad[*vdev], offset + (at as u64 * 977) % 4096).await;
            let report = check(&bad, false).await;
            if report.findings.is_empty() {
                // The import above made a commit of its own: not all of its blocks are in use here.
                continue;
            }
            named += 1;
            let place = report.findings[0].place.as_ref().unwrap();
            assert_eq!(place.offset, *offset, "{:#?}", report.findings);
            assert_eq!(place.device, bad[*vdev].info().uri);
            assert!(report.findings[0].repairable);
            let report = check(&bad, true).await;
            assert!(report.clean, "{:#?}", report.findings);
            let report = check(&bad, false).await;
            assert!(report.findings.is_empty(), "{:#?}", report.findings);
            assert_holds(&bad, &held).await;
        }
        assert!(named > 5, "{named}");
    });
}

#[test]
fn labels_come_back_from_each_other() {
    run(async {
        let (devices, held) = sample(2).await;
        for device in &devices {
            for block in [0, (64 << 20) / 4096 - 1] {
                let zeroes = DmaBuf::zeroed(4096).freeze();
                if device.info().uuid == devices[0].info().uuid || block == 0 {
                    device.write(block * 4096, zeroes).await.unwrap();
                }
            }
        }
        let report = check(&devices, false).await;
        let labels = report.findings.iter().filter(|finding| finding.kind == Kind::Label).count();
        assert_eq!((labels, report.clean), (3, false));
        assert!(check(&devices, true).await.clean);
        assert!(check(&devices, false).await.findings.is_empty());
        assert_holds(&devices, &held).await;
    });
}

#[test]
fn bitmaps_and_counts_come_back_from_the_trees() {
    run(async {
        let (devices, held) = sample(1).await;
        // Both copies of every bitmap: their magic tells them.
        let mut spoiled = 0;
        let image = devices[0].image().unwrap();
        let bad = copy_of(&devices);
        for (at, block) in image.chunks(4096).enumerate() {
            if block.starts_with(b"RMSP") {
                spoil(&bad[0], at as u64 * 4096 + 100).await;
                spoiled += 1;
            }
        }
        assert!(spoiled >= 8);
        let report = check(&bad, false).await;
        assert!(report.findings.iter().any(|finding| finding.kind == Kind::Bitmap && finding.repairable));
        assert!(
            report.findings.iter().all(|finding| finding.severity < Severity::Lost),
            "{:#?}",
            report.findings
        );
        let repaired = check(&bad, true).await;
        assert!(repaired.clean, "{:#?}", repaired.findings);
        assert!(check(&bad, false).await.findings.is_empty());
        assert_holds(&bad, &held).await;
    });
}

#[test]
fn what_cannot_be_derived_is_named_with_its_cost_and_left_alone() {
    run(async {
        let (devices, held) = sample(1).await;
        // A block that only the clone has.
        let lost = &held[2].1[(MIB + 4096 * 7) as usize..][..4096];
        let at =
            devices[0].image().unwrap().chunks(4096).position(|block| block == lost).unwrap() as u64 * 4096;
        spoil(&devices[0], at + 9).await;
        for repair in [false, true] {
            let report = check(&devices, repair).await;
            assert!(!report.clean);
            let [finding] = report.findings.as_slice() else { panic!("{:#?}", report.findings) };
            assert_eq!(
                (finding.kind, finding.severity, finding.repairable),
                (Kind::Data, Severity::Lost, false)
            );
            let [extent] = finding.extents.as_slice() else { panic!("{finding:#?}") };
            assert_eq!((extent.name.as_str(), extent.lba, extent.blocks), ("c", 256 + 7, 1));
            assert_eq!(finding.place.as_ref().unwrap().offset, at);
        }
        // In use: an error for that block, and a place that has nothing to do with devices.
        let manager = manager();
        let pool = manager.import(devices.clone()).await.unwrap();
        let c = pool.open("c").await.unwrap();
        let (result, _) = c.read(MIB, DmaBuf::uninit(1 << 20)).await;
        assert!(matches!(result, Err(IoError::Unrecovered { .. })));
        for block in (0..256).filter(|block| *block != 7) {
            assert_eq!(c.read(MIB + block * 4096, DmaBuf::uninit(4096)).await.0, Ok(()));
        }
        let damage = pool.damage().await.unwrap();
        assert_eq!((damage.len(), damage[0].state, damage[0].kind), (1, DamageState::Lost, Kind::Data));
        assert_eq!((damage[0].extents[0].name.as_str(), damage[0].extents[0].offset), ("c", MIB + 7 * 4096));
        assert!(damage[0].epoch.is_some());
        // Written over, it is nobody's any more.
        write(&pool, "c", MIB, &pattern(3, 0, 1 << 20)).await;
        assert!(pool.damage().await.unwrap().is_empty());
    });
}

#[test]
fn a_scrub_heals_and_finds_and_goes_on_after_a_restart() {
    run(async {
        let (devices, held) = sample(1).await;
        let lost = &held[0].1[(8 * MIB) as usize..][..4096];
        let image = devices[0].image().unwrap();
        let at = image.chunks(4096).position(|block| block == lost).unwrap() as u64 * 4096;
        let places = places(&devices).await;
        let manager = manager();
        let pool = manager.import(devices.clone()).await.unwrap();
        let status = pool.scrub_start(Some(1 << 20), false).await.unwrap();
        assert_eq!(status.state, "running");
        let status = pool.scrub_stop().await.unwrap();
        assert_eq!(status.state, "stopped");
        spoil(&devices[0], at).await;
        // Second copies are never read otherwise.
        let home = crate::pool::local::shard(pool.key(), 0).unwrap();
        let live = home.live_metadata().await;
        let second = live.iter().map(|block| block.offset()).max().unwrap();
        spoil(&devices[0], second + 5).await;
        drop((home, places));
        pool.scrub_start(Some(1 << 40), true).await.unwrap();
        let mut status = pool.scrub_status().await.unwrap();
        for _ in 0..2000 {
            if status.state != "running" {
                break;
            }
            crate::reactor::sleep(std::time::Duration::from_millis(5)).await;
            status = pool.scrub_status().await.unwrap();
        }
        assert_eq!(status.state, "idle");
        let last = status.last_completed.unwrap();
        assert_eq!((last.errors, last.healed), (1, 1), "{:#?}", pool.damage().await.unwrap());
        assert!(last.bytes >= 14 << 20);
        let states: Vec<_> = pool.damage().await.unwrap().into_iter().map(|damage| damage.state).collect();
        assert!(states.contains(&DamageState::Lost) && states.contains(&DamageState::Healed), "{states:?}");
        // A scrub that runs when the pool goes is taken up again.
        pool.scrub_start(Some(1 << 20), true).await.unwrap();
        manager.shut(&pool).await.unwrap();
        drop(pool);
        let pool = manager.import(devices.clone()).await.unwrap();
        let status = pool.scrub_status().await.unwrap();
        assert_eq!(status.state, "running");
        assert_eq!(status.last_completed, Some(last));
        pool.scrub_stop().await.unwrap();
        manager.shut(&pool).await.unwrap();
    });
}
