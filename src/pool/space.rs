//! The space of one shard: which blocks of its regions are in use.
//!
//! A shard owns whole regions. *Data* regions hold volume data; *metadata* regions come in pairs, and every
//! metadata block is written to the same offset of both, so that each page has a second copy far from the first
//! (on another device when there is one).
//!
//! A block is in one of three states: free, used, or *held*. A block reserved for a write is held until the write
//! is mapped. A freed block is held until the commit that no longer refers to it is durable and every read that
//! might still look at it has ended; only then it may be written again. What a commit stores is the used state
//! alone: held blocks are free as of that commit.
//!
//! A region's stored form is one block: a header and its bitmap ([`Region::encode`]).
#![forbid(unsafe_code)]

mod region;

use std::collections::{BTreeSet, VecDeque};

use self::region::{Region, Regions, words};
pub use self::region::{RegionId, RegionKind};
use super::label::Geometry;
use super::pointer::{Block, FANOUT};
use super::sabotage::{Sabotage, is};

/// Blocks freed under one commit generation.
struct Held {
    generation: u64,
    /// First block and number; none goes beyond its region.
    runs: Vec<(Block, u32)>,
}

/// Which kind of block an allocation wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Volume data.
    Data,
    /// Pages, node records, bitmaps.
    Metadata,
}

/// How badly regions are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Nothing is free in those that the shard has.
    Needed,
    /// Writes would be scattered over those that the shard has: only while the pool has plenty.
    Plenty,
}

/// A freed or allocated block that the bitmaps say cannot be: the pool's metadata contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("block {block:?} is {found}, though the tree says otherwise")]
pub struct SpaceError {
    /// The block.
    pub block: Block,
    /// "free", "in use" or "not in a region of this shard".
    pub found: &'static str,
}

#[derive(Default)]
struct Pool {
    free: u64,
    used: u64,
    held: u64,
    cursor: Option<(RegionId, u32)>,
}

/// The space of one shard.
pub struct Space {
    shard: u16,
    geometry: Geometry,
    regions: Regions,
    data: Pool,
    metadata: Pool,
    queue: VecDeque<Held>,
    dirty: BTreeSet<RegionId>,
    metadata_regions: u64,
    /// Leaf pages of the bitmaps' tree that have a region.
    leaves: BTreeSet<u32>,
}

impl Space {
    /// No regions yet.
    pub fn new(shard: u16, geometry: Geometry) -> Space {
        Space {
            shard,
            geometry,
            regions: Regions::default(),
            data: Pool::default(),
            metadata: Pool::default(),
            queue: VecDeque::new(),
            dirty: BTreeSet::new(),
            metadata_regions: 0,
            leaves: BTreeSet::new(),
        }
    }

    /// Adds an empty region.
    pub fn add(&mut self, id: RegionId, kind: RegionKind) {
        let region = Region::empty(&self.geometry, id, kind);
        self.pool_mut(kind).free += u64::from(region.free);
        self.metadata_regions += u64::from(kind != RegionKind::Data);
        self.leaves.insert(id.0 / FANOUT as u32);
        self.regions.insert(id, region);
    }

    /// Loads the stored form of a region that was [added](Space::add) before.
    pub fn load(&mut self, id: RegionId, stored: &[u8]) -> Result<(), &'static str> {
        if self.regions.get(id).is_none() {
            return Err("a region record without its region");
        }
        let used = Space::decode(&self.geometry, self.shard, id, stored)?;
        self.set_used(id, &used);
        Ok(())
    }

    /// The stored form of a region, one block; `None` when it is not the shard's.
    pub fn encode(&self, id: RegionId) -> Option<Vec<u8>> {
        self.regions.get(id).map(|region| region.encode(&self.geometry, self.shard, id))
    }

    /// Regions whose stored form has changed since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<RegionId> {
        for id in &self.dirty {
            if let Some(region) = self.regions.get_mut(*id) {
                region.dirty = false;
            }
        }
        std::mem::take(&mut self.dirty)
    }

    fn mark_dirty(&mut self, id: RegionId) {
        if let Some(region) = self.regions.get_mut(id)
            && !std::mem::replace(&mut region.dirty, true)
        {
            self.dirty.insert(id);
        }
    }

    /// Whether anything changed since the last [`take_dirty`](Space::take_dirty).
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Allocates up to `want` adjacent blocks, at least one, and marks them used; `None` when no block is free.
    pub fn allocate(&mut self, what: Use, want: u32) -> Option<(Block, u32)> {
        let (first, count) = self.reserve(what, want)?;
        let claimed = self.claim(first, count);
        debug_assert!(claimed.is_ok(), "a reserved block is not in use");
        Some((first, count))
    }

    /// Reserves up to `want` adjacent blocks, at least one, for a write whose data is still on its way. They are
    /// held, not used: a commit in between does not count them. Ends in [`claim`](Space::claim) or
    /// [`cancel`](Space::cancel).
    ///
    /// A cursor passes once through a region and then goes on in the emptiest one: a burst of writes becomes long
    /// writes of the device, whatever was freed in between.
    pub fn reserve(&mut self, what: Use, want: u32) -> Option<(Block, u32)> {
        let pool = self.pool(what);
        if pool.free == 0 {
            return None;
        }
        let blocks = self.geometry.region_blocks;
        let at_cursor = pool.cursor.and_then(|(id, offset)| {
            let (at, count) = self.regions.get(id)?.find(offset, blocks, want)?;
            Some((id, at, count))
        });
        let (id, at, count) = at_cursor.or_else(|| {
            let (id, region) = self.best(what)?;
            let (at, count) = region.find(0, blocks, want)?;
            Some((id, at, count))
        })?;
        let region = self.regions.get_mut(id)?;
        for (word, mask) in words(at, count) {
            region.held[word] |= mask;
        }
        region.free -= count;
        let first = region.first.add(u64::from(at));
        let kind = region.kind;
        let pool = self.pool_mut(kind);
        pool.free -= u64::from(count);
        pool.held += u64::from(count);
        pool.cursor = Some((id, at + count));
        Some((first, count))
    }

    /// Whether the cursor has come to the end of its region and each other one is so much in use that writes would be
    /// scattered over what is free in it.
    pub fn wants_fresh(&self, what: Use) -> bool {
        let blocks = self.geometry.region_blocks;
        let region = |id| self.regions.get(id);
        let goes_on =
            |(id, offset)| region(id).is_some_and(|region| region.find(offset, blocks, 1).is_some());
        !self.pool(what).cursor.is_some_and(goes_on)
            && self.emptiest(what).is_none_or(|(_, region)| region.free < blocks / 4 * 3)
    }

    /// The region that allocation goes on in. Data: the emptiest, for long writes. Metadata: the fullest of those with
    /// some room, so that the others drain, and can be given back.
    fn best(&self, what: Use) -> Option<(RegionId, &Region)> {
        let roomy = |region: &Region| region.free >= self.geometry.region_blocks / 4;
        let fullest = || {
            let metadata = self.regions.iter().filter(|(_, region)| region.kind != RegionKind::Data);
            metadata.filter(|(_, region)| roomy(region)).min_by_key(|(_, region)| region.free)
        };
        match what {
            Use::Data => self.emptiest(what),
            Use::Metadata => fullest().or_else(|| self.emptiest(what)),
        }
    }

    /// The region with the most free blocks, if one has any.
    fn emptiest(&self, what: Use) -> Option<(RegionId, &Region)> {
        let candidates = self.regions.iter().filter(|(_, region)| {
            (region.kind == RegionKind::Data) == (what == Use::Data) && region.free > 0
        });
        // The lowest of several, so that what is written one after the other lies one after the other.
        candidates.rev().max_by_key(|(_, region)| region.free)
    }

    /// Marks `count` blocks of one region from `first` on as used: reserved ones, or ones that a journal record names.
    pub fn claim(&mut self, first: Block, count: u32) -> Result<(), SpaceError> {
        let region_blocks = self.geometry.region_blocks;
        let (id, offset, region) = self.region_mut(first)?;
        if count > region_blocks - offset {
            return Err(SpaceError { block: first, found: "the first of a run beyond its region" });
        }
        for (word, mask) in words(offset, count) {
            let wrong = mask & region.used[word];
            if wrong != 0 {
                let at = word as u64 * 64 + u64::from(wrong.trailing_zeros()) - u64::from(offset);
                return Err(SpaceError { block: first.add(at), found: "in use" });
            }
        }
        let mut were_held = 0;
        for (word, mask) in words(offset, count) {
            were_held += (region.held[word] & mask).count_ones();
            region.held[word] &= !mask;
            region.used[word] |= mask;
        }
        region.used_count += count;
        region.free -= count - were_held;
        let kind = region.kind;
        let pool = self.pool_mut(kind);
        pool.used += u64::from(count);
        pool.held -= u64::from(were_held);
        pool.free -= u64::from(count - were_held);
        self.mark_dirty(id);
        Ok(())
    }

    /// Frees a block under commit generation `generation`: unused from now on, but held.
    pub fn free(&mut self, block: Block, generation: u64) -> Result<(), SpaceError> {
        self.free_run(block, 1, generation)
    }

    /// Frees `count` blocks that follow each other, from `first` on.
    pub fn free_run(&mut self, first: Block, count: u32, generation: u64) -> Result<(), SpaceError> {
        let (mut first, mut left) = (first, count);
        while left > 0 {
            let passed = self.free_in_region(first, left, generation)?;
            first = first.add(u64::from(passed));
            left -= passed;
        }
        if is(Sabotage::FreeEarly) {
            self.release(u64::MAX);
        }
        Ok(())
    }

    /// Frees some blocks, those that follow each other in one go. Returns how many.
    pub fn free_each(
        &mut self,
        blocks: impl Iterator<Item = Block>,
        generation: u64,
    ) -> Result<i64, SpaceError> {
        let (mut run, mut freed): (Option<(Block, u32)>, i64) = (None, 0);
        for block in blocks {
            freed += 1;
            run = match run {
                Some((first, count)) if first.add(u64::from(count)) == block => Some((first, count + 1)),
                before => {
                    if let Some((first, count)) = before {
                        self.free_run(first, count, generation)?;
                    }
                    Some((block, 1))
                }
            };
        }
        if let Some((first, count)) = run {
            self.free_run(first, count, generation)?;
        }
        Ok(freed)
    }

    /// Frees those of `count` blocks from `first` on that are in its region. Returns how many.
    fn free_in_region(&mut self, first: Block, count: u32, generation: u64) -> Result<u32, SpaceError> {
        let region_blocks = self.geometry.region_blocks;
        let (id, offset, region) = self.region_mut(first)?;
        let count = count.min(region_blocks - offset);
        for (word, mask) in words(offset, count) {
            let wrong = mask & !region.used[word];
            if wrong != 0 {
                let at = word as u64 * 64 + u64::from(wrong.trailing_zeros()) - u64::from(offset);
                return Err(SpaceError { block: first.add(at), found: "free" });
            }
        }
        for (word, mask) in words(offset, count) {
            region.used[word] &= !mask;
            region.held[word] |= mask;
        }
        region.used_count -= count;
        let kind = region.kind;
        let pool = self.pool_mut(kind);
        pool.used -= u64::from(count);
        pool.held += u64::from(count);
        self.mark_dirty(id);
        if self.queue.back().is_none_or(|held| held.generation != generation) {
            self.queue.push_back(Held { generation, runs: Vec::new() });
        }
        let runs = self.queue.back_mut().map(|held| &mut held.runs);
        match runs.map(|runs| (runs.last_mut(), offset)) {
            Some((Some(last), 1..)) if last.0.add(u64::from(last.1)) == first => last.1 += count,
            _ => {
                if let Some(held) = self.queue.back_mut() {
                    held.runs.push((first, count));
                }
            }
        }
        Ok(count)
    }

    /// Gives back a reserved block whose write failed.
    pub fn cancel(&mut self, block: Block) {
        let Ok((_, offset, region)) = self.region_mut(block) else { return };
        let (word, bit) = (offset as usize / 64, 1u64 << (offset % 64));
        if region.held[word] & bit == 0 || region.used[word] & bit != 0 {
            return;
        }
        region.held[word] &= !bit;
        region.free += 1;
        let kind = region.kind;
        let pool = self.pool_mut(kind);
        pool.held -= 1;
        pool.free += 1;
    }

    /// Ends the holding of all blocks freed under `generation` or before. Returns how many became free.
    pub fn release(&mut self, generation: u64) -> u64 {
        let mut released = 0;
        while self.queue.front().is_some_and(|held| held.generation <= generation) {
            let Some(held) = self.queue.pop_front() else { break };
            for (first, count) in held.runs {
                let Ok((_, offset, region)) = self.region_mut(first) else { continue };
                let (mut ended, mut free) = (0, 0);
                for (word, mask) in words(offset, count) {
                    let held = region.held[word] & mask;
                    region.held[word] &= !mask;
                    ended += held.count_ones();
                    free += (held & !region.used[word]).count_ones();
                }
                region.free += free;
                let kind = region.kind;
                let pool = self.pool_mut(kind);
                pool.held -= u64::from(ended);
                pool.free += u64::from(free);
                released += u64::from(free);
            }
        }
        released
    }

    /// Takes up to `count` wholly free data regions out, leaving at least `keep` of them.
    pub fn take_empty(&mut self, count: usize, keep: usize) -> Vec<RegionId> {
        let blocks = self.geometry.region_blocks;
        // This comes after each commit: where so little is free, no region need be looked at.
        if self.data.free <= keep as u64 * u64::from(blocks) {
            return Vec::new();
        }
        let cursor = self.data.cursor.map(|(id, _)| id);
        let empty: Vec<RegionId> = self
            .regions
            .iter()
            .filter(|(id, region)| {
                region.kind == RegionKind::Data && region.free == blocks && Some(*id) != cursor
            })
            .map(|(id, _)| id)
            .collect();
        let take = empty.len().saturating_sub(keep).min(count);
        let taken: Vec<RegionId> = empty.into_iter().rev().take(take).collect();
        for id in &taken {
            self.regions.remove(*id);
            self.dirty.remove(id);
            self.data.free -= u64::from(blocks);
        }
        taken
    }

    /// Takes wholly free metadata regions out, as long as `keep` blocks stay free in others.
    pub fn take_empty_metadata(&mut self, keep: u64) -> Vec<RegionId> {
        let blocks = self.geometry.region_blocks;
        let spare = self.metadata.free.saturating_sub(keep) / u64::from(blocks);
        if spare == 0 {
            return Vec::new();
        }
        let cursor = self.metadata.cursor.map(|(id, _)| id);
        let is_empty = |(id, region): &(RegionId, &Region)| {
            region.kind != RegionKind::Data && region.free == blocks && Some(*id) != cursor
        };
        let empty = self.regions.iter().rev().filter(is_empty).map(|(id, _)| id);
        let taken: Vec<RegionId> = empty.take(spare as usize).collect();
        for id in &taken {
            self.regions.remove(*id);
            self.dirty.remove(id);
            self.metadata.free -= u64::from(blocks);
            self.metadata_regions -= 1;
        }
        taken
    }

    /// Where the second copy of a metadata block is.
    pub fn twin(&self, block: Block) -> Option<Block> {
        let (index, offset) = self.geometry.region_of(block)?;
        match self.regions.get(RegionId::new(block.vdev() as u8, index))?.kind {
            RegionKind::Metadata { twin } => {
                Some(Block::new(twin.vdev(), self.geometry.region(twin.index()) + u64::from(offset)))
            }
            RegionKind::Data => None,
        }
    }

    /// Whether `block` is marked as used.
    #[cfg(test)]
    pub fn is_used(&self, block: Block) -> bool {
        self.geometry.region_of(block).is_some_and(|(index, offset)| {
            self.regions
                .get(RegionId::new(block.vdev() as u8, index))
                .is_some_and(|region| region.used[offset as usize / 64] & (1 << (offset % 64)) != 0)
        })
    }

    /// Every used block, in order.
    #[cfg(test)]
    pub fn used_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.regions.iter().flat_map(move |(_, region)| {
            (0..self.geometry.region_blocks)
                .filter(|offset| region.used[*offset as usize / 64] & (1 << (offset % 64)) != 0)
                .map(|offset| region.first.add(u64::from(offset)))
        })
    }

    /// The blocks in use of every region, one bit each, the region's first block in the lowest bit of the first word.
    pub fn used_bits(&self) -> impl Iterator<Item = (RegionId, RegionKind, &[u64])> + '_ {
        self.regions.iter().map(|(id, region)| (id, region.kind, region.used.as_slice()))
    }

    /// The bitmap in the stored form of a region, if that is whole and is `shard`'s.
    pub fn decode(
        geometry: &Geometry,
        shard: u16,
        id: RegionId,
        stored: &[u8],
    ) -> Result<Vec<u64>, &'static str> {
        region::decode(geometry, shard, id, stored)
    }

    /// Takes over the blocks in use of a region that was [added](Space::add) before.
    pub fn set_used(&mut self, id: RegionId, bits: &[u64]) {
        let Some(region) = self.regions.get_mut(id) else { return };
        let kind = region.kind;
        let used: u32 = bits.iter().map(|word| word.count_ones()).sum();
        region.used.copy_from_slice(bits);
        region.free -= used;
        region.used_count = used;
        let pool = self.pool_mut(kind);
        pool.free -= u64::from(used);
        pool.used += u64::from(used);
    }

    /// The stored forms of all regions are to be written again.
    pub fn touch_all(&mut self) {
        let ids: Vec<RegionId> = self.regions.iter().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.mark_dirty(id));
    }

    /// The regions owned.
    pub fn regions(&self) -> impl Iterator<Item = (RegionId, RegionKind)> + '_ {
        self.regions.iter().map(|(id, region)| (id, region.kind))
    }

    /// Changed regions, all regions, and leaf pages of a tree with one slot for each region.
    pub fn shape(&self) -> (u64, u64, u64) {
        (self.dirty.len() as u64, self.regions.len() as u64, self.leaves.len() as u64)
    }

    /// Metadata regions, without their twins.
    pub fn metadata_regions(&self) -> u64 {
        self.metadata_regions
    }

    /// Whether blocks freed under a durable commit wait for nothing but reads to end.
    pub fn waits_for_reads(&self, durable: u64) -> bool {
        self.queue.front().is_some_and(|held| held.generation <= durable)
    }

    /// Blocks that can be allocated now.
    pub fn free_blocks(&self, what: Use) -> u64 {
        self.pool(what).free
    }

    /// Blocks in use.
    pub fn used_count(&self, what: Use) -> u64 {
        self.pool(what).used
    }

    /// Blocks freed and held.
    pub fn held_blocks(&self, what: Use) -> u64 {
        self.pool(what).held
    }

    fn pool(&self, what: Use) -> &Pool {
        match what {
            Use::Data => &self.data,
            Use::Metadata => &self.metadata,
        }
    }

    fn pool_mut(&mut self, kind: RegionKind) -> &mut Pool {
        match kind {
            RegionKind::Data => &mut self.data,
            RegionKind::Metadata { .. } => &mut self.metadata,
        }
    }

    fn region_mut(&mut self, block: Block) -> Result<(RegionId, u32, &mut Region), SpaceError> {
        let unknown = SpaceError { block, found: "not in a region of this shard" };
        let (index, offset) = self.geometry.region_of(block).ok_or(unknown)?;
        let id = RegionId::new(block.vdev() as u8, index);
        let region = self.regions.get_mut(id).ok_or(unknown)?;
        Ok((id, offset, region))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        let geometry = Geometry::choose(64 << 20, 64 << 20, 1, None);
        let mut space = Space::new(0, geometry);
        space.add(RegionId::new(0, 0), RegionKind::Metadata { twin: RegionId::new(0, 9) });
        space.add(RegionId::new(0, 2), RegionKind::Data);
        space.add(RegionId::new(0, 3), RegionKind::Data);
        space
    }

    #[test]
    fn allocation_is_sequential_and_runs_across_regions_never() {
        let mut s = space();
        let (a, n) = s.allocate(Use::Data, 200).unwrap();
        assert_eq!(n, 200);
        let (b, n) = s.allocate(Use::Data, 200).unwrap();
        assert_eq!((b, n), (a.add(200), 56));
        let (_, n) = s.allocate(Use::Data, 1000).unwrap();
        assert_eq!(n, 256);
        assert_eq!(s.allocate(Use::Data, 1), None);
        assert_eq!(s.free_blocks(Use::Metadata), 256);
    }

    #[test]
    fn a_freed_block_is_held_until_released() {
        let mut s = space();
        let (a, n) = s.allocate(Use::Data, 256).unwrap();
        let (_, m) = s.allocate(Use::Data, 256).unwrap();
        assert_eq!(n + m, 512);
        s.free(a.add(7), 4).unwrap();
        assert_eq!(s.free(a.add(7), 4), Err(SpaceError { block: a.add(7), found: "free" }));
        assert_eq!(s.allocate(Use::Data, 1), None);
        assert_eq!(s.release(3), 0);
        assert_eq!(s.release(4), 1);
        assert_eq!(s.allocate(Use::Data, 5), Some((a.add(7), 1)));
    }

    #[test]
    fn stored_form_round_trips_without_the_held_state() {
        let mut s = space();
        let (a, _) = s.allocate(Use::Data, 10).unwrap();
        s.free(a, 1).unwrap();
        let id = RegionId::new(0, 2);
        let stored = s.encode(id).unwrap();
        let mut t = space();
        t.load(id, &stored).unwrap();
        assert!(!t.is_used(a) && t.is_used(a.add(1)) && !t.is_used(a.add(10)));
        assert_eq!(t.used_count(Use::Data), 9);
        assert_eq!(t.free_blocks(Use::Data), 512 - 9);
        assert!(t.load(RegionId::new(0, 3), &stored).is_err());
    }

    #[test]
    fn random_walk_agrees_with_a_set() {
        let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5EED_u64);
        println!("SEED={seed}");
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let mut s = space();
        let (mut used, mut held, mut generation) = (BTreeSet::new(), BTreeSet::new(), 1);
        for _ in 0..20_000 {
            match next() % 4 {
                0 | 1 => {
                    if let Some((first, n)) = s.allocate(Use::Data, next() % 40 + 1) {
                        for i in 0..u64::from(n) {
                            assert!(!held.contains(&first.add(i)));
                            assert!(used.insert(first.add(i)));
                        }
                    } else {
                        assert_eq!(used.len() + held.len(), 512);
                    }
                }
                2 => {
                    for _ in 0..next() % 30 {
                        if let Some(block) = used.iter().nth(next() as usize % used.len().max(1)).copied() {
                            used.remove(&block);
                            held.insert(block);
                            s.free(block, generation).unwrap();
                        }
                    }
                }
                _ => {
                    assert_eq!(s.release(generation), held.len() as u64);
                    held.clear();
                    generation += 1;
                }
            }
            assert_eq!(s.used_count(Use::Data) as usize, used.len());
            assert_eq!(s.free_blocks(Use::Data) as usize, 512 - used.len() - held.len());
        }
        assert!(s.used_blocks().eq(used.iter().copied()));
    }
}
