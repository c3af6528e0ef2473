//! Differences: exactly the blocks that changed, in parts of any size, whatever the tree of nodes went through.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::pool::{DiffRange, PoolErrorKind, RangeKind};

const BLOCK: u64 = 4096;

/// The whole difference, put together from parts of at most `max` ranges.
async fn diff(pool: &Pool, base: Option<&str>, node: &str, max: usize) -> Vec<DiffRange> {
    let (mut offset, mut ranges) = (0, Vec::<DiffRange>::new());
    loop {
        let part = pool.diff_part(base, node, offset, max).await.unwrap();
        assert!(part.ranges.len() <= max, "{} ranges, {max} asked for", part.ranges.len());
        for range in part.ranges {
            assert!(range.offset >= offset && range.length > 0, "{range:?} in the part from {offset}");
            match ranges.last_mut() {
                Some(last) if last.offset + last.length == range.offset && last.kind == range.kind => {
                    last.length += range.length;
                }
                _ => ranges.push(range),
            }
        }
        match part.next_offset {
            Some(next) => {
                assert!(next > offset, "the part from {offset} leads to {next}");
                offset = next;
            }
            None => return ranges,
        }
    }
}

fn range(offset: u64, length: u64, kind: RangeKind) -> DiffRange {
    DiffRange { offset, length, kind }
}

#[test]
fn what_changed_is_named_and_what_became_zero_is_told_apart() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 32)).await.unwrap();
        write(&pool, "v", 0, &pattern(1, 0, 8 << 20)).await;
        pool.snapshot_create("v", "a").await.unwrap();
        write(&pool, "v", (1 << 20) - 4096, &pattern(2, 0, 12288)).await;
        write(&pool, "v", 20 << 20, &pattern(2, 0, 4096)).await;
        let v = pool.open("v").await.unwrap();
        v.deallocate(6 << 20, 1 << 20).await.unwrap();
        // Nothing was there, and nothing is.
        v.deallocate(24 << 20, 1 << 20).await.unwrap();
        write(&pool, "v", 28 << 20, &pattern(3, 0, 4096)).await;
        v.deallocate(28 << 20, 4096).await.unwrap();
        pool.snapshot_create("v", "b").await.unwrap();
        let (data, zero) = (RangeKind::Data, RangeKind::Zero);
        let forth = [
            range((1 << 20) - 4096, 12288, data),
            range(6 << 20, 1 << 20, zero),
            range(20 << 20, 4096, data),
        ];
        let back = [
            range((1 << 20) - 4096, 12288, data),
            range(6 << 20, 1 << 20, data),
            range(20 << 20, 4096, zero),
        ];
        let held = [range(0, 6 << 20, data), range(7 << 20, 1 << 20, data), range(20 << 20, 4096, data)];
        for max in [1, 2, 1000] {
            assert_eq!(diff(&pool, Some("a"), "b", max).await, forth);
            assert_eq!(diff(&pool, Some("b"), "a", max).await, back);
            assert_eq!(diff(&pool, None, "b", max).await, held);
            assert_eq!(diff(&pool, Some("b"), "v", max).await, []);
        }
        let part = pool.diff_part(Some("a"), "b", 7 << 20, 10).await.unwrap();
        assert_eq!((part.ranges, part.next_offset), (vec![forth[2]], None));
        let part = pool.diff_part(Some("a"), "b", u64::MAX - 4095, 10).await.unwrap();
        assert_eq!((part.ranges, part.next_offset), (vec![], None));
        assert_eq!(pool.diff_part(None, "b", 512, 1).await.unwrap_err().kind, PoolErrorKind::Invalid);
        assert_eq!(pool.diff_part(None, "c", 0, 1).await.unwrap_err().kind, PoolErrorKind::NotFound);
    });
}

#[test]
fn parts_are_small_and_a_large_volume_costs_what_it_holds() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(256)]).await;
        pool.volume_create(spec("v", 1 << 20)).await.unwrap();
        // Every other block of some chunks far apart: as many ranges as blocks.
        let chunks = [0u64, 77, 1000, 500_001, (1 << 20) - 1];
        for chunk in chunks {
            for block in (0..256).step_by(2) {
                write(&pool, "v", (chunk << 20) + block * BLOCK, &pattern(1, 0, 4096)).await;
            }
        }
        let all = diff(&pool, None, "v", 100).await;
        assert_eq!(all.len(), chunks.len() * 128);
        let part = pool.diff_part(None, "v", 0, 100).await.unwrap();
        assert_eq!((part.ranges.len(), part.next_offset), (100, Some(200 * BLOCK)));
        assert_eq!(part.ranges, all[..100]);
        let part = pool.diff_part(None, "v", all[300].offset, 7).await.unwrap();
        assert_eq!(part.ranges, all[300..307]);
    });
}

#[test]
fn a_snapshot_that_is_deleted_while_it_is_compared_stays_whole_until_the_answer() {
    run(async {
        let (_manager, pool) = pool_on(&[ram(128)]).await;
        pool.volume_create(spec("v", 200)).await.unwrap();
        // A block of every MiB, so that each shard's walk takes some turns.
        for round in 0..2 {
            for mib in 0..200 {
                write(&pool, "v", mib << 20, &pattern(round, 0, 4096)).await;
            }
            if round == 0 {
                pool.snapshot_create("v", "a").await.unwrap();
            }
        }
        let before = pool.info().await.unwrap().allocated;
        {
            let mut walk = std::pin::pin!(pool.diff_part(Some("a"), "v", 0, 1000));
            // One turn: it has begun, and waits somewhere in its walk.
            let begun = std::future::poll_fn(|cx| std::task::Poll::Ready(walk.as_mut().poll(cx))).await;
            assert!(begun.is_pending());
            pool.delete("a").await.unwrap();
            for _ in 0..1000 {
                crate::reactor::yield_now().await;
            }
            assert_eq!(pool.info().await.unwrap().allocated, before);
            let part = walk.await.unwrap();
            assert_eq!(part.ranges.len(), 200);
        }
        deleted(&pool).await;
        assert_eq!(pool.info().await.unwrap().allocated, 200 * BLOCK);
        assert_sound(&pool).await;
    });
}

/// What happens to a world of volumes and snapshots; numbers are taken modulo what there is.
#[derive(Debug, Clone)]
enum Event {
    Write { volume: usize, block: u64, count: u64 },
    WriteSector { volume: usize, sector: u64 },
    Trim { volume: usize, block: u64, count: u64 },
    Zero { volume: usize, block: u64, count: u64 },
    Snapshot { volume: usize },
    Clone { snapshot: usize },
    Rollback { volume: usize, snapshot: usize },
    Resize { volume: usize, mib: u64 },
    Delete { snapshot: usize },
}

fn event() -> impl Strategy<Value = Event> {
    let (which, block, count) = (0..16usize, 0..4096u64, 1..600u64);
    let place = (which.clone(), block, count);
    prop_oneof![
        6 => place.clone().prop_map(|(volume, block, count)| Event::Write { volume, block, count }),
        2 => (which.clone(), 0..32768u64).prop_map(|(volume, sector)| Event::WriteSector { volume, sector }),
        2 => place.clone().prop_map(|(volume, block, count)| Event::Trim { volume, block, count }),
        1 => place.prop_map(|(volume, block, count)| Event::Zero { volume, block, count }),
        4 => which.clone().prop_map(|volume| Event::Snapshot { volume }),
        1 => which.clone().prop_map(|snapshot| Event::Clone { snapshot }),
        1 => (which.clone(), which.clone()).prop_map(|(volume, snapshot)| Event::Rollback { volume, snapshot }),
        1 => (which.clone(), 1..16u64).prop_map(|(volume, mib)| Event::Resize { volume, mib }),
        1 => which.prop_map(|snapshot| Event::Delete { snapshot }),
    ]
}

/// Which write each block of a node is from.
#[derive(Clone, Default)]
struct Content {
    blocks: u64,
    writes: BTreeMap<u64, u64>,
}

impl Content {
    /// What a comparison must say of this one against `base`.
    fn against(&self, base: &Content) -> Vec<DiffRange> {
        let mut ranges: Vec<DiffRange> = Vec::new();
        for block in 0..self.blocks {
            let now = self.writes.get(&block);
            if now == base.writes.get(&block) {
                continue;
            }
            let (offset, kind) =
                (block * BLOCK, if now.is_some() { RangeKind::Data } else { RangeKind::Zero });
            match ranges.last_mut() {
                Some(last) if last.offset + last.length == offset && last.kind == kind => {
                    last.length += BLOCK
                }
                _ => ranges.push(range(offset, BLOCK, kind)),
            }
        }
        ranges
    }
}

#[derive(Default)]
struct World {
    volumes: Vec<(String, Content)>,
    snapshots: Vec<(String, Content)>,
    serial: u64,
}

impl World {
    async fn apply(&mut self, pool: &Pool, event: Event) {
        self.serial += 1;
        let serial = self.serial;
        let (volumes, snapshots) = (self.volumes.len(), self.snapshots.len());
        match event {
            Event::Write { volume, block, count } => {
                let (name, content) = &mut self.volumes[volume % volumes];
                let block = block % content.blocks;
                let count = count.min(content.blocks - block);
                write(pool, name, block * BLOCK, &pattern(serial, block, (count * BLOCK) as usize)).await;
                content.writes.extend((block..block + count).map(|block| (block, serial)));
            }
            Event::WriteSector { volume, sector } => {
                let (name, content) = &mut self.volumes[volume % volumes];
                let sector = sector % (content.blocks * 8);
                write(pool, name, sector * 512, &pattern(serial, sector, 512)).await;
                content.writes.insert(sector / 8, serial);
            }
            Event::Trim { volume, block, count } | Event::Zero { volume, block, count } => {
                let (name, content) = &mut self.volumes[volume % volumes];
                let block = block % content.blocks;
                let count = count.min(content.blocks - block);
                let volume = pool.open(name).await.unwrap();
                match event {
                    Event::Trim { .. } => volume.deallocate(block * BLOCK, count * BLOCK).await.unwrap(),
                    _ => volume.write_zeroes(block * BLOCK, count * BLOCK, false).await.unwrap(),
                }
                content.writes.retain(|at, _| !(block..block + count).contains(at));
            }
            Event::Snapshot { volume } if snapshots < 6 => {
                let (name, content) = &self.volumes[volume % volumes];
                let snapshot = format!("{name}@{serial}");
                pool.snapshot_create(name, &snapshot).await.unwrap();
                self.snapshots.push((snapshot, content.clone()));
            }
            Event::Clone { snapshot } if snapshots > 0 && volumes < 3 => {
                let (snapshot, content) = &self.snapshots[snapshot % snapshots];
                let name = format!("c{serial}");
                pool.clone_create(snapshot, &name).await.unwrap();
                self.volumes.push((name, content.clone()));
            }
            Event::Rollback { volume, snapshot } if snapshots > 0 => {
                let (name, content) = &mut self.volumes[volume % volumes];
                let (snapshot, before) = &self.snapshots[snapshot % snapshots];
                pool.rollback(name, snapshot, None).await.unwrap();
                *content = before.clone();
            }
            Event::Resize { volume, mib } => {
                let (name, content) = &mut self.volumes[volume % volumes];
                pool.resize(name, mib << 20, true).await.unwrap();
                content.blocks = mib * 256;
                content.writes.retain(|block, _| *block < mib * 256);
            }
            Event::Delete { snapshot } if snapshots > 0 => {
                let (name, _) = self.snapshots.remove(snapshot % snapshots);
                pool.delete(&name).await.unwrap();
            }
            _ => {}
        }
    }

    async fn check(&self, pool: &Pool, max: usize) {
        let nodes: Vec<&(String, Content)> = self.volumes.iter().chain(&self.snapshots).collect();
        for (name, content) in &nodes {
            assert_eq!(
                diff(pool, None, name, max).await,
                content.against(&Content::default()),
                "all of {name}"
            );
            for (base, other) in &nodes {
                let found = diff(pool, Some(base), name, max).await;
                assert_eq!(found, content.against(other), "{base} to {name}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_two_nodes_differ_in_exactly_the_blocks_written_in_only_one(
        shards in 1..6u16,
        max in prop_oneof![1..4usize, 1..400usize],
        events in prop::collection::vec(event(), 1..60),
    ) {
        run(async move {
            let manager = manager();
            let options = PoolOptions { shards: Some(shards), ..PoolOptions::default() };
            let pool = manager.create("p", vec![ram(256)], options).await.unwrap();
            let mut world = World::default();
            pool.volume_create(spec("v", 8)).await.unwrap();
            world.volumes.push(("v".to_owned(), Content { blocks: 8 * 256, ..Content::default() }));
            for event in events {
                world.apply(&pool, event).await;
            }
            world.check(&pool, max).await;
            deleted(&pool).await;
            world.check(&pool, max).await;
            assert_sound(&pool).await;
        });
    }
}
