//! The tree of nodes: promotion, pins, groups, rollback there and back, long chains, names and sizes while open; and what
//! is told of it.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};

use super::*;
use crate::pool::{NodeKind, PoolErrorKind, PoolEvent, PoolEventKind};

const MIB: usize = 1 << 20;

#[test]
fn a_promoted_clone_owns_what_came_before_it() {
    run(async {
        let devices = [ram(64)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        for i in 1..=4u64 {
            write(&pool, "v", 0, &pattern(i, 0, MIB)).await;
            pool.snapshot_create("v", &format!("v@{i}")).await.unwrap();
        }
        pool.clone_create("v@2", "c").await.unwrap();
        write(&pool, "c", 0, &pattern(9, 0, MIB)).await;
        pool.snapshot_create("c", "c@1").await.unwrap();
        pool.clone_create("v@1", "d").await.unwrap();
        let before = pool.info().await.unwrap().allocated;
        assert_eq!(pool.promote("v").await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_eq!(pool.promote("v@1").await.unwrap_err().kind, PoolErrorKind::Invalid);
        let promoted = pool.promote("c").await.unwrap();
        assert_eq!((promoted.origin, promoted.parent.as_deref()), (None, Some("c@1")));
        for pass in 0..2 {
            let pool = match pass {
                0 => Arc::clone(&pool),
                _ => {
                    manager.export("p").await.unwrap();
                    manager.import(devices.to_vec()).await.unwrap()
                }
            };
            for (snapshot, volume) in [("v@1", "c"), ("v@2", "c"), ("v@3", "v"), ("v@4", "v"), ("c@1", "c")] {
                assert_eq!(pool.find(snapshot).await.unwrap().volume.as_deref(), Some(volume), "{snapshot}");
            }
            let origin = pool.find("v@2").await.unwrap().uuid;
            assert_eq!(pool.find("v").await.unwrap().origin, Some(origin));
            assert_eq!(pool.find("d").await.unwrap().origin, Some(pool.find("v@1").await.unwrap().uuid));
            assert_eq!(pool.info().await.unwrap().allocated, before);
            assert_sound(&pool).await;
        }
        let pool = manager.get("p").unwrap();
        // The old main line goes, with what it alone had; and the promoted one can be rolled back along its new past.
        for name in ["v@3", "v@4", "v"] {
            pool.delete(name).await.unwrap();
        }
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, before - 2 * MIB as u64);
        pool.rollback("c", "v@2", None).await.unwrap();
        assert_eq!(read(&pool, "c", 0, MIB).await, pattern(2, 0, MIB));
        // And there and back again.
        let error = pool.promote("c").await.unwrap_err();
        assert!(error.text.contains("no clone"), "{error}");
        pool.promote("d").await.unwrap();
        assert_eq!(pool.find("v@1").await.unwrap().volume.as_deref(), Some("d"));
        assert_eq!(pool.find("v@2").await.unwrap().volume.as_deref(), Some("c"));
        pool.promote("c").await.unwrap();
        assert_eq!(pool.find("v@1").await.unwrap().volume.as_deref(), Some("c"));
        assert_sound(&pool).await;
    });
}

#[test]
fn a_promotion_over_what_is_gone_keeps_the_rest() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, MIB)).await;
        pool.snapshot_create("v", "v@1").await.unwrap();
        pool.snapshot_create("v", "v@2").await.unwrap();
        pool.clone_create("v@2", "c").await.unwrap();
        pool.delete("v@2").await.unwrap();
        pool.delete("v").await.unwrap();
        deleted(&pool).await;
        pool.promote("c").await.unwrap();
        assert_eq!(pool.find("v@1").await.unwrap().volume.as_deref(), Some("c"));
        assert_eq!(pool.find("c").await.unwrap().origin, None);
        assert_eq!(read(&pool, "c", 0, MIB).await, pattern(1, 0, MIB));
        assert_sound(&pool).await;
    });
}

#[test]
fn what_is_pinned_stays_and_the_refusal_says_for_whom() {
    run(async {
        let devices = [ram(64)];
        let (manager, mut pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, MIB)).await;
        pool.snapshot_create("v", "v@1").await.unwrap();
        pool.pin("v@1", "serving", Some("version 3".into())).await.unwrap();
        pool.pin("v@1", "audit", None).await.unwrap();
        pool.pin("v@1", "audit", Some("2026".into())).await.unwrap();
        pool.pin("v", "training", None).await.unwrap();
        assert_eq!(pool.pin("v", "no good name", None).await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_eq!(
            pool.pin("v", "long", Some("x".repeat(1001))).await.unwrap_err().kind,
            PoolErrorKind::Invalid
        );
        for i in 0..63 {
            pool.pin("v", &format!("p{i}"), None).await.unwrap();
        }
        assert_eq!(pool.pin("v", "one-more", None).await.unwrap_err().kind, PoolErrorKind::Invalid);
        for i in 0..63 {
            pool.unpin("v", &format!("p{i}")).await.unwrap();
        }
        for _ in 0..2 {
            let error = pool.delete("v@1").await.unwrap_err();
            assert_eq!(error.kind, PoolErrorKind::Busy);
            assert!(error.text.contains("'serving' (version 3), 'audit' (2026)"), "{error}");
            assert_eq!(pool.delete("v").await.unwrap_err().kind, PoolErrorKind::Busy);
            assert_eq!(pool.rollback("v", "v@1", None).await.unwrap_err().kind, PoolErrorKind::Busy);
            let listed = pool.nodes().await.unwrap();
            let pins = |name: &str| listed.iter().find(|node| node.name == name).unwrap().pins.len();
            assert_eq!((pins("v@1"), pins("v")), (2, 1));
            // They hold after a crash as well.
            let crashed = copy_of(&devices);
            let after = super::manager();
            let copy = after.import(crashed).await.unwrap();
            assert_eq!(copy.delete("v@1").await.unwrap_err().kind, PoolErrorKind::Busy);
            drop(copy);
            manager.export("p").await.unwrap();
            pool = manager.import(devices.to_vec()).await.unwrap();
        }
        // What is pinned can be kept under another name, and goes on being pinned through snapshots.
        pool.rollback("v", "v@1", Some("v@kept".into())).await.unwrap();
        pool.snapshot_create("v", "v@2").await.unwrap();
        assert!(pool.find("v@2").await.unwrap().pins.is_empty());
        assert_eq!(pool.find("v").await.unwrap().pins.len(), 1);
        pool.rename("v@1", "w@1").await.unwrap();
        pool.unpin("w@1", "serving").await.unwrap();
        pool.unpin("w@1", "nobody").await.unwrap();
        assert!(!pool.delete("w@1").await.unwrap_err().text.contains("serving"));
        pool.unpin("w@1", "audit").await.unwrap();
        pool.delete("w@1").await.unwrap();
        pool.unpin("v", "training").await.unwrap();
        pool.delete("v").await.unwrap();
        deleted(&pool).await;
        assert_sound(&pool).await;
    });
}

#[test]
fn a_hundred_volumes_are_taken_in_one_instant() {
    run(async {
        let devices = [ram(96)];
        let (_manager, pool) = pool_on(&devices).await;
        let names: Vec<String> = (0..100).map(|i| format!("v{i}")).collect();
        for (i, name) in names.iter().enumerate() {
            pool.volume_create(spec(name, 1)).await.unwrap();
            write(&pool, name, 0, &pattern(i as u64, 0, 8192)).await;
        }
        let wanted: Vec<(String, String)> =
            names.iter().map(|name| (name.clone(), format!("{name}@1"))).collect();
        let taken = pool.snapshot_group(wanted.clone()).await.unwrap();
        assert!(taken.iter().all(|node| node.epoch == taken[0].epoch && node.kind == NodeKind::Snapshot));
        for name in &names {
            write(&pool, name, 0, &pattern(777, 0, 4096)).await;
        }
        assert_eq!(pool.snapshot_group(wanted).await.unwrap_err().kind, PoolErrorKind::Exists);
        let many = (0..513).map(|i| (format!("v{i}"), format!("w{i}"))).collect();
        assert_eq!(pool.snapshot_group(many).await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_sound(&pool).await;
        let after = manager();
        let copy = after.import(copy_of(&devices)).await.unwrap();
        for (i, name) in names.iter().enumerate() {
            assert_eq!(read(&copy, &format!("{name}@1"), 0, 8192).await, pattern(i as u64, 0, 8192));
        }
        assert_sound(&copy).await;
    });
}

#[test]
fn a_volume_goes_back_and_forth_over_snapshots_that_stay() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(96)]).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        for i in 0..6u64 {
            write(&pool, "v", 0, &pattern(i, 0, 2 * MIB)).await;
            write(&pool, "v", (i % 2 + 2) << 20, &pattern(i, 1, MIB)).await;
            pool.snapshot_create("v", &format!("v@{i}")).await.unwrap();
        }
        for (at, to) in [0u64, 5, 2, 2, 4, 1, 3, 5, 0].into_iter().enumerate() {
            let keep = (at % 2 == 0).then(|| format!("v@kept{at}"));
            pool.rollback("v", &format!("v@{to}"), keep.clone()).await.unwrap();
            assert_eq!(read(&pool, "v", 0, 2 * MIB).await, pattern(to, 0, 2 * MIB), "{to}");
            let (result, bytes) = v.read((to % 2 + 2) << 20, DmaBuf::uninit(MIB)).await;
            result.unwrap();
            assert_eq!(bytes[..], pattern(to, 1, MIB));
            write(&pool, "v", 0, &pattern(100 + at as u64, 0, MIB)).await;
            for i in 0..6u64 {
                assert_eq!(read(&pool, &format!("v@{i}"), 0, MIB).await, pattern(i, 0, MIB));
            }
            assert_sound(&pool).await;
        }
        assert_eq!(read(&pool, "v@kept8", 0, MIB).await, pattern(107, 0, MIB));
        deleted(&pool).await;
        assert_sound(&pool).await;
    });
}

#[test]
fn names_and_sizes_change_while_open_and_snapshots_outlive_their_volume() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(64)]).await;
        pool.volume_create(spec("v", 4)).await.unwrap();
        let v = pool.open("v").await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 4 * MIB)).await;
        pool.snapshot_create("v", "v@1").await.unwrap();
        let s = pool.open("v@1").await.unwrap();
        pool.rename("v", "w").await.unwrap();
        pool.rename("v@1", "w@1").await.unwrap();
        assert_eq!((v.name(), s.name()), ("w".into(), "w@1".into()));
        assert_eq!(pool.rename("w", "w@1").await.unwrap_err().kind, PoolErrorKind::Exists);
        assert_eq!(pool.find("w@1").await.unwrap().volume.as_deref(), Some("w"));
        pool.resize("w", 8 << 20, false).await.unwrap();
        assert_eq!((v.size(), s.size()), (8 << 20, 4 << 20));
        v.write(7 << 20, DmaBuf::copy_of(&pattern(2, 0, MIB)).freeze(), false).await.unwrap();
        pool.snapshot_create("w", "w@2").await.unwrap();
        pool.resize("w", 1 << 20, true).await.unwrap();
        assert_sound(&pool).await;
        pool.resize("w", 8 << 20, false).await.unwrap();
        assert_eq!(read(&pool, "w", MIB as u64, 7 * MIB).await, vec![0; 7 * MIB]);
        assert_eq!(read(&pool, "w@2", 7 << 20, MIB).await, pattern(2, 0, MIB));
        // To a smaller and a larger state.
        pool.rollback("w", "w@1", Some("w@big".into())).await.unwrap();
        assert_eq!(v.size(), 4 << 20);
        pool.rollback("w", "w@2", None).await.unwrap();
        assert_eq!((v.size(), read(&pool, "w", 7 << 20, MIB).await), (8 << 20, pattern(2, 0, MIB)));
        drop((v, s));
        pool.delete("w").await.unwrap();
        deleted(&pool).await;
        assert_sound(&pool).await;
        assert_eq!(read(&pool, "w@1", 0, 4 * MIB).await, pattern(1, 0, 4 * MIB));
        assert_eq!(pool.find("w@1").await.unwrap().volume, None);
        pool.clone_create("w@2", "back").await.unwrap();
        assert_eq!(read(&pool, "back", 7 << 20, MIB).await, pattern(2, 0, MIB));
        for name in ["w@1", "back", "w@big", "w@2"] {
            pool.delete(name).await.unwrap();
            assert_sound(&pool).await;
        }
        deleted(&pool).await;
        assert_eq!((pool.info().await.unwrap().allocated, pool.records_left()), (0, 0));
    });
}

#[test]
fn the_middle_of_a_chain_of_thousands_goes() {
    run(async {
        const CHAIN: u64 = 2000;
        let (_manager, pool) = pool_on(&[ram(4096)]).await;
        pool.volume_create(spec("v", 2)).await.unwrap();
        for i in 0..CHAIN {
            write(&pool, "v", i % 512 * 4096, &pattern(i, 0, 4096)).await;
            pool.snapshot_create("v", &format!("v@{i}")).await.unwrap();
        }
        for i in (0..CHAIN).step_by(100) {
            pool.clone_create(&format!("v@{i}"), &format!("c{i}")).await.unwrap();
        }
        let whole = pool.info().await.unwrap().allocated;
        assert_eq!(whole, CHAIN * 4096);
        // All but a few, those that clones grew from included.
        let kept = |i: &u64| [0, 700, 1333, CHAIN - 1].contains(i);
        for i in (0..CHAIN).filter(|i| !kept(i)) {
            pool.delete(&format!("v@{i}")).await.unwrap();
        }
        deleted(&pool).await;
        assert_sound(&pool).await;
        for i in (0..CHAIN).filter(kept).chain((0..CHAIN).step_by(100)) {
            for (name, up_to) in [(format!("v@{i}"), i), (format!("c{i}"), i)] {
                if pool.find(&name).await.is_err() {
                    continue;
                }
                for block in 0..512.min(up_to + 1) {
                    let last = block + (up_to - block) / 512 * 512;
                    let found = read(&pool, &name, block * 4096, 4096).await;
                    assert!(found == pattern(last, 0, 4096), "{name} block {block}");
                }
            }
        }
        // What is left is what those that are left name; each goes by itself.
        for name in pool.nodes().await.unwrap().into_iter().map(|node| node.name) {
            let unique = pool.node(&name).await.unwrap().unique.unwrap();
            let before = pool.info().await.unwrap().allocated;
            pool.delete(&name).await.unwrap();
            deleted(&pool).await;
            assert_eq!(before - pool.info().await.unwrap().allocated, unique, "{name}");
        }
        assert_sound(&pool).await;
        assert_eq!((pool.info().await.unwrap().allocated, pool.records_left()), (0, 0));
    });
}

#[test]
fn clones_of_a_full_volume_cost_no_space_at_any_number_and_depth() {
    run(async {
        let devices = [ram(128)];
        let (manager, pool) = pool_on(&devices).await;
        pool.volume_create(spec("v", 16)).await.unwrap();
        let whole = pattern(1, 0, 16 * MIB);
        write(&pool, "v", 0, &whole).await;
        pool.snapshot_create("v", "v@1").await.unwrap();
        let full = pool.info().await.unwrap().allocated;
        assert_eq!(full, 16 * MIB as u64);
        for i in 0..64 {
            pool.clone_create("v@1", &format!("wide{i}")).await.unwrap();
        }
        pool.clone_create("v@1", "deep0").await.unwrap();
        for i in 1..=32 {
            let (below, snapshot) = (format!("deep{}", i - 1), format!("deep{}@1", i - 1));
            pool.snapshot_create(&below, &snapshot).await.unwrap();
            pool.clone_create(&snapshot, &format!("deep{i}")).await.unwrap();
        }
        assert_eq!(pool.info().await.unwrap().allocated, full, "clones hold nothing of their own");
        // Each writes one block, which is its own and of those above it.
        for i in 0..64u64 {
            write(&pool, &format!("wide{i}"), i * 4096, &pattern(100 + i, 0, 4096)).await;
        }
        write(&pool, "deep32", 40 * 4096, &pattern(99, 0, 4096)).await;
        assert_eq!(pool.info().await.unwrap().allocated, full + 65 * 4096);
        let with = |block: usize, seed: u64| {
            let mut bytes = whole.clone();
            bytes[block * 4096..][..4096].copy_from_slice(&pattern(seed, 0, 4096));
            bytes
        };
        assert_sound(&pool).await;
        manager.export("p").await.unwrap();
        let pool = manager.import(devices.to_vec()).await.unwrap();
        for i in 0..64 {
            let found = read(&pool, &format!("wide{i}"), 0, 16 * MIB).await;
            assert!(found == with(i, 100 + i as u64), "wide{i}");
            let node = pool.node(&format!("wide{i}")).await.unwrap();
            assert_eq!((node.unique, node.referenced), (Some(4096), full));
        }
        for i in 0..32 {
            assert!(read(&pool, &format!("deep{i}"), 0, 16 * MIB).await == whole, "deep{i}");
        }
        assert!(read(&pool, "deep32", 0, 16 * MIB).await == with(40, 99));
        assert!(read(&pool, "v", 0, 16 * MIB).await == whole);
    });
}

#[test]
fn what_happens_is_told() {
    run(async {
        let told = Arc::new(Mutex::new(Vec::<PoolEvent>::new()));
        let sink = Arc::clone(&told);
        let manager = manager().with_events(Arc::new(move |event| sink.lock().unwrap().push(event)));
        let options = PoolOptions { shards: Some(2), ..PoolOptions::default() };
        let pool = manager.create("p", vec![ram(64)], options).await.unwrap();
        pool.volume_create(spec("v", 512)).await.unwrap();
        pool.snapshot_create("v", "v@1").await.unwrap();
        pool.delete("v@1").await.unwrap();
        let v = pool.open("v").await.unwrap();
        let mut at = 0;
        while v.write(at, DmaBuf::copy_of(&pattern(1, at, MIB)).freeze(), false).await.is_ok() {
            at += MIB as u64;
        }
        let second = std::time::Duration::from_millis(1200);
        crate::reactor::sleep(second).await;
        v.deallocate(0, 512 << 20).await.unwrap();
        v.flush().await.unwrap();
        drop(v);
        assert_sound(&pool).await;
        crate::reactor::sleep(second).await;
        pool.delete("v").await.unwrap();
        let told = std::mem::take(&mut *told.lock().unwrap());
        assert!(told.iter().all(|event| event.pool == "p"));
        let (mut nodes, mut thresholds) = (Vec::new(), Vec::new());
        for event in told {
            match event.kind {
                PoolEventKind::Created { name, .. } => nodes.push(format!("+{name}")),
                PoolEventKind::Deleted { name, .. } => nodes.push(format!("-{name}")),
                PoolEventKind::Threshold { percent, rising, .. } => thresholds.push((percent, rising)),
                PoolEventKind::Damage { text } => panic!("{text}"),
            }
        }
        assert_eq!(nodes, ["+v", "+v@1", "-v@1", "-v"]);
        let (up, down): (Vec<_>, Vec<_>) = thresholds.into_iter().partition(|(_, rising)| *rising);
        assert_eq!(up, [(75, true), (85, true), (95, true)]);
        assert_eq!(down, [(75, false), (85, false), (95, false)]);
    });
}
