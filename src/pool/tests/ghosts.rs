//! Deleting nodes that others grew from: what they share stays, everything else comes back, in any order and through
//! crashes.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use super::*;
use crate::pool::NodeKind;

const MIB: u64 = 1 << 20;

async fn trim(pool: &Pool, volume: &str, offset: u64, len: u64) {
    pool.open(volume).await.unwrap().deallocate(offset, len).await.unwrap();
}

/// What every volume and snapshot of a random tree holds.
type World = BTreeMap<String, Vec<u8>>;

async fn grow(pool: &Pool, random: &mut Random, nodes: u64) -> World {
    const MIBS: u64 = 5;
    pool.volume_create(spec("v0", MIBS)).await.unwrap();
    let mut world = World::from([("v0".to_owned(), vec![0; (MIBS * MIB) as usize])]);
    let mut volumes = vec!["v0".to_owned()];
    let mut snapshots: Vec<String> = Vec::new();
    for serial in 1..nodes {
        for _ in 0..random.next(4) {
            let volume = &volumes[random.next(volumes.len() as u64) as usize];
            let (at, len) = (random.next(MIBS << 8) << 12, (1 + random.next(300)) << 12);
            let len = len.min(MIBS * MIB - at);
            let bytes = world.get_mut(volume).unwrap();
            let range = &mut bytes[at as usize..(at + len) as usize];
            if random.next(5) == 0 {
                trim(pool, volume, at, len).await;
                range.fill(0);
            } else {
                let new = pattern(serial, at, len as usize);
                write(pool, volume, at, &new).await;
                range.copy_from_slice(&new);
            }
        }
        let volume = volumes[random.next(volumes.len() as u64) as usize].clone();
        match random.next(5) {
            0 | 1 => {
                let name = format!("s{serial}");
                pool.snapshot_create(&volume, &name).await.unwrap();
                world.insert(name.clone(), world[&volume].clone());
                snapshots.push(name);
            }
            2 | 3 if !snapshots.is_empty() => {
                let snapshot = &snapshots[random.next(snapshots.len() as u64) as usize];
                let name = format!("v{serial}");
                pool.clone_create(snapshot, &name).await.unwrap();
                world.insert(name.clone(), world[snapshot].clone());
                volumes.push(name);
            }
            4 if !snapshots.is_empty() => {
                let snapshot = &snapshots[random.next(snapshots.len() as u64) as usize];
                let kept = format!("s{serial}");
                pool.rollback(&volume, snapshot, Some(kept.clone())).await.unwrap();
                let before = world.insert(volume, world[snapshot].clone()).unwrap();
                world.insert(kept.clone(), before);
                snapshots.push(kept);
            }
            _ => {}
        }
    }
    world
}

async fn check(pool: &Pool, world: &World) {
    for (name, bytes) in world {
        assert!(read(pool, name, 0, bytes.len()).await == *bytes, "{name}");
    }
    assert_sound(pool).await;
}

async fn any_order(seed: u64) {
    let mut random = Random(seed | 1);
    let devices = [ram(192)];
    let (_manager, pool) = pool_on(&devices).await;
    let mut world = grow(&pool, &mut random, 40).await;
    check(&pool, &world).await;
    while let Some(name) = world.keys().nth(random.next(world.len() as u64) as usize).cloned() {
        let unique = pool.node(&name).await.unwrap().unique.unwrap();
        let before = pool.info().await.unwrap().allocated;
        pool.delete(&name).await.unwrap();
        deleted(&pool).await;
        let freed = before - pool.info().await.unwrap().allocated;
        assert_eq!(freed, unique, "{name}");
        world.remove(&name);
        if random.next(3) == 0 {
            check(&pool, &world).await;
        }
    }
    assert_sound(&pool).await;
    let info = pool.info().await.unwrap();
    assert_eq!((info.allocated, info.volumes, info.snapshots), (0, 0, 0));
    assert!(pool.records_left() == 0, "nothing is left of them");
}

#[test]
fn any_tree_goes_in_any_order_and_gives_back_what_was_said() {
    for seed in seeds() {
        println!("SEED={seed}");
        run(any_order(seed));
    }
}

/// Deletes with crashes in the middle of the background work, again and again.
async fn through_crashes(seed: u64) {
    let mut random = Random(seed | 1);
    let mut devices = vec![ram(96)];
    let (mut manager, mut pool) = pool_on(&devices).await;
    let mut world = grow(&pool, &mut random, 40).await;
    while !world.is_empty() {
        for _ in 0..1 + random.next(3) {
            if let Some(name) = world.keys().nth(random.next(world.len() as u64) as usize).cloned() {
                pool.delete(&name).await.unwrap();
                world.remove(&name);
            }
        }
        for _ in 0..random.next(60) {
            crate::reactor::yield_now().await;
            if random.next(20) == 0 {
                // Part of it becomes durable.
                for shard in 0..4 {
                    crate::pool::local::shard(pool.key(), shard).unwrap().commit().await.unwrap();
                }
            }
        }
        let crashed = copy_of(&devices);
        manager.shut(&pool).await.unwrap();
        devices = crashed;
        manager = Rc::new(super::manager());
        pool = manager.import(devices.clone()).await.unwrap();
        if random.next(2) == 0 {
            check(&pool, &world).await;
        }
    }
    deleted(&pool).await;
    assert_sound(&pool).await;
    let info = pool.info().await.unwrap();
    assert_eq!((info.allocated, info.volumes, info.snapshots), (0, 0, 0));
    assert!(info.damage.is_empty(), "{:?}", info.damage);
    assert!(pool.records_left() == 0, "nothing is left of them");
}

#[test]
fn deleting_goes_on_after_a_crash_at_any_point() {
    for seed in seeds().into_iter().rev().take(2) {
        println!("SEED={seed}");
        run(through_crashes(seed));
    }
}

#[test]
fn what_several_clones_share_stays_and_only_that() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 8)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 8 << 20)).await;
        pool.snapshot_create("v", "s").await.unwrap();
        pool.clone_create("s", "a").await.unwrap();
        pool.clone_create("s", "b").await.unwrap();
        // Each keeps another part; the sixth MiB is nobody's but the snapshot's.
        for (volume, kept) in [("v", 0), ("a", 1), ("b", 2)] {
            for mib in 0..6 {
                if mib != kept {
                    trim(&pool, volume, mib * MIB, MIB).await;
                }
            }
            // And every second block of the seventh MiB.
            for block in 0..128 {
                write(&pool, volume, 6 * MIB + block * 8192, &pattern(kept, 0, 4096)).await;
            }
        }
        let node = pool.node("s").await.unwrap();
        assert_eq!(node.unique, Some(3 * MIB + MIB / 2));
        let before = pool.info().await.unwrap().allocated;
        pool.delete("s").await.unwrap();
        deleted(&pool).await;
        assert_eq!(before - pool.info().await.unwrap().allocated, 3 * MIB + MIB / 2);
        assert_sound(&pool).await;
        assert_eq!(pool.info().await.unwrap().snapshots, 0);
        assert!(pool.node("a").await.unwrap().parent.is_none());
        for (volume, kept) in [("v", 0), ("a", 1), ("b", 2)] {
            let bytes = read(&pool, volume, kept * MIB, 1 << 20).await;
            assert!(bytes == pattern(1, 0, 8 << 20)[(kept * MIB) as usize..][..1 << 20]);
            let node = pool.node(volume).await.unwrap();
            assert_eq!((node.kind, node.unique), (NodeKind::Volume, Some(MIB + MIB / 2)), "{volume}");
        }
        // The last one takes all that is left over.
        pool.delete("v").await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 4 * MIB + MIB / 2);
        pool.delete("a").await.unwrap();
        deleted(&pool).await;
        assert_sound(&pool).await;
        let node = pool.node("b").await.unwrap();
        assert_eq!((node.unique, node.written), (Some(3 * MIB), 3 * MIB));
        assert_eq!(pool.info().await.unwrap().allocated, 3 * MIB);
        pool.delete("b").await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 0);
        assert_eq!(pool.records_left(), 0);
    });
}

#[test]
fn what_a_ghost_holds_for_nobody_comes_back_by_and_by() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(192)]).await;
        pool.volume_create(spec("v", 32)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 32 << 20)).await;
        pool.snapshot_create("v", "s").await.unwrap();
        pool.clone_create("s", "a").await.unwrap();
        pool.delete("s").await.unwrap();
        deleted(&pool).await;
        let home = crate::pool::lifecycle::home(pool.key()).unwrap();
        // Half of it is overwritten in both; then of the other half one lets go, so it stays.
        for volume in ["v", "a"] {
            write(&pool, volume, 0, &pattern(2, 0, 16 << 20)).await;
        }
        trim(&pool, "v", 16 * MIB, 16 * MIB).await;
        assert_eq!(pool.info().await.unwrap().allocated, 64 * MIB);
        home.look_after_ghosts().await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 48 * MIB);
        assert_sound(&pool).await;
        // Little is not worth the while.
        write(&pool, "a", 16 * MIB, &pattern(3, 0, 1 << 20)).await;
        home.look_after_ghosts().await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 49 * MIB);
        assert_eq!(pool.node("a").await.unwrap().unique, Some(32 * MIB));
        pool.delete("v").await.unwrap();
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 32 * MIB);
        assert_sound(&pool).await;
    });
}
