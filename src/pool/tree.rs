//! A shard's trees in memory: looking a leaf up, making the path to it dirty, mapping and unmapping blocks, and
//! turning all that into a commit. Everything here is synchronous: what is not in memory is reported as
//! [`Need::Load`], and the caller reads it and tries again.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasherDefault;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uuid::Uuid;
use zerocopy::IntoBytes;

use super::cache::{FrameId, Missing, NumberHasher, Object, Pages, Parent};
use super::journal::{Journal, Record};
use super::label::Geometry;
use super::node::{NodeId, Nodes};
use super::pointer::{Block, Epoch, FANOUT, LEVELS, Page, Pointer};
use super::root::RootRecord;
use super::sabotage::{Sabotage, is};
use super::space::{Space, SpaceError, Use};

/// A volume's number in its pool; never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeId(pub u32);

/// Where a volume's writes go.
pub struct VolumeState {
    /// Its head.
    pub head: NodeId,
    /// Mapping changes wait: a snapshot is being taken.
    pub held: bool,
    /// Blocks that the volume's tree names, over all shards; told to hosts.
    pub referenced: Arc<AtomicU64>,
}

/// What must be done before a change can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// This page must be read.
    Load(Missing),
    /// Metadata blocks must become free.
    Metadata,
    /// A commit must come first: the journal is full, or too many pages are dirty.
    Commit,
}

/// Which part of the space for metadata a change may take. A commit must always find what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserve {
    /// New data: leaves enough for what gives space back.
    Write,
    /// What gives space back, though its pages take some where a snapshot shares them: leaves enough for deleting.
    Trim,
    /// What a deletion changes.
    Reap,
    /// A change that was made before a crash, and fitted then.
    Replay,
}

/// Blocks of records that a deletion changes: the node's, its heirs', and those of what went before.
const REAP_RECORDS: u64 = 8;
/// Metadata blocks that only a [`Reserve::Trim`] may take.
const TRIM_BLOCKS: u64 = 32;
/// Journal blocks that must be left before a change: it may take three, a seal of many volumes as many.
const JOURNAL_BLOCKS: u64 = 12;
/// The fewest dirty pages that call for a commit before any further change.
const PAGES_MAX: usize = 4096;

/// Blocks of a write that lie side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block.
    pub block: Block,
    /// Blocks.
    pub count: u32,
}

/// Everything of a shard that is in memory.
pub struct State {
    /// The shard's number.
    pub shard: u16,
    /// Epoch of new blocks.
    pub epoch: Epoch,
    /// Generation of the commit being gathered; `generation - 1` was begun last.
    pub generation: u64,
    /// Nodes.
    pub nodes: Nodes,
    /// Pages.
    pub pages: Pages,
    /// Space.
    pub space: Space,
    /// Journal.
    pub journal: Journal,
    /// Volumes.
    pub volumes: HashMap<VolumeId, VolumeState, BuildHasherDefault<NumberHasher>>,
    nodes_root: Pointer,
    space_root: Pointer,
}

/// The bytes of one block that a commit writes.
pub enum Content {
    /// A page, which does not change any more.
    Page(Rc<Page>),
    /// Node records or a bitmap.
    Bytes(Vec<u8>),
}

impl Content {
    /// One block.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Content::Page(page) => page.as_bytes(),
            Content::Bytes(bytes) => bytes,
        }
    }
}

/// What a commit writes.
pub struct Plan {
    /// Metadata blocks and what goes there, in block order.
    pub writes: Vec<(Block, Content)>,
    /// What the root slot will say.
    pub root: RootRecord,
    /// For [`Journal::end_commit`].
    pub journal: (u64, u64),
}

impl State {
    /// A shard without content.
    pub fn new(pool: Uuid, shard: u16, geometry: Geometry, page_limit: usize, journal_next: u64) -> State {
        State {
            shard,
            epoch: 1,
            generation: 1,
            nodes: Nodes::default(),
            pages: Pages::new(page_limit),
            space: Space::new(shard, geometry),
            journal: Journal::new(pool, shard, u64::from(geometry.journal_blocks), journal_next),
            volumes: HashMap::default(),
            nodes_root: Pointer::EMPTY,
            space_root: Pointer::EMPTY,
        }
    }

    /// Takes over what a root slot says.
    pub fn adopt(&mut self, root: &RootRecord) {
        self.epoch = root.epoch;
        self.generation = root.generation + 1;
        self.nodes_root = root.nodes;
        self.space_root = root.space;
        self.nodes.set_reaping(root.reaping);
    }

    /// Where a tree starts.
    pub fn root(&mut self, object: Object) -> Pointer {
        match object {
            Object::Node(node) => self.nodes.root(node),
            Object::Nodes => self.nodes_root,
            Object::Space => self.space_root,
        }
    }

    fn set_root(&mut self, object: Object, root: Pointer) {
        match object {
            Object::Node(node) => self.nodes.set_root(node, root),
            Object::Nodes => self.nodes_root = root,
            Object::Space => self.space_root = root,
        }
    }

    /// The leaf page that maps `leaf` in the tree from `root`; `None` where there is a hole.
    pub fn find_leaf(
        &mut self,
        object: Object,
        root: Pointer,
        leaf: u64,
    ) -> Result<Option<FrameId>, Missing> {
        let mut pointer = root;
        for level in (0..LEVELS).rev() {
            if pointer.is_hole() {
                return Ok(None);
            }
            let Some(frame) = self.pages.find(pointer.block()) else {
                return Err(Missing { pointer, object, level });
            };
            if level == 0 {
                return Ok(Some(frame));
            }
            pointer = self.pages.page(frame).get(slot_of(leaf, level));
        }
        unreachable!("the loop ends at level 0")
    }

    /// The first leaf after `leaf` that may not be a hole, judged by the pages in memory.
    pub fn next_leaf(&mut self, root: Pointer, leaf: u64) -> u64 {
        let mut pointer = root;
        for level in (0..LEVELS).rev() {
            if pointer.is_hole() {
                // A page of this level would have covered so many leaves.
                return ((leaf >> (8 * level)) + 1) << (8 * level);
            }
            let Some(frame) = self.pages.find(pointer.block()) else { break };
            if level > 0 {
                pointer = self.pages.page(frame).get(slot_of(leaf, level));
            }
        }
        leaf + 1
    }

    /// Checks that the path to `leaf` is in memory and that a change of it can be carried out and recorded.
    pub fn prepare(&mut self, object: Object, leaf: u64, reserve: Reserve) -> Result<(), Need> {
        if self.pages.dirty_leaf(object, leaf).is_none() {
            let root = self.root(object);
            self.find_leaf(object, root, leaf).map_err(Need::Load)?;
        }
        self.prepare_room(reserve)
    }

    /// Checks that a change of one leaf can be carried out and recorded, wherever the path to it may be.
    pub fn prepare_room(&self, reserve: Reserve) -> Result<(), Need> {
        let kept = match reserve {
            Reserve::Write => self.commit_needs_at_most() + TRIM_BLOCKS,
            Reserve::Trim => self.commit_needs_at_most(),
            Reserve::Reap => self.commit_needs_after(),
            Reserve::Replay => 0,
        };
        if self.space.free_blocks(Use::Metadata) < u64::from(LEVELS) + kept {
            return Err(Need::Metadata);
        }
        let crowded = self.pages.waiting() > self.pages.limit().max(PAGES_MAX);
        if reserve != Reserve::Replay && (crowded || self.journal.room() < JOURNAL_BLOCKS) {
            return Err(Need::Commit);
        }
        Ok(())
    }

    /// What a commit may take after one more change, which frees blocks in as many regions as it has blocks at most.
    pub fn commit_needs_after(&self) -> u64 {
        let (dirty, all, _) = self.space.shape();
        let more = (all - dirty).min(2 * FANOUT as u64);
        self.commit_needs() + more + u64::from(LEVELS + 1)
    }

    /// What any commit may take: a deletion changes the bitmap of every region and some records.
    pub fn commit_needs_at_most(&self) -> u64 {
        let (dirty, all, _) = self.space.shape();
        let path = u64::from(LEVELS + 1);
        self.commit_needs() + (all - dirty) + path * (1 + REAP_RECORDS)
    }

    fn floor(&self, object: Object, end: u64) -> Epoch {
        match object {
            Object::Node(node) => self.nodes.floor(node, end),
            Object::Nodes | Object::Space => 0,
        }
    }

    /// Makes the pages from the root down to `lowest` on the path to `leaf` dirty and returns the lowest. The
    /// caller has called [`prepare`](State::prepare).
    pub(super) fn dirty_path(
        &mut self,
        object: Object,
        leaf: u64,
        lowest: u32,
    ) -> Result<FrameId, SpaceError> {
        if lowest == 0
            && let Some(frame) = self.pages.dirty_leaf(object, leaf)
        {
            return Ok(frame);
        }
        let mut pointer = self.root(object);
        let mut parent = Parent::Root(object);
        let mut frame = None;
        for level in (lowest..LEVELS).rev() {
            let floor = self.floor(object, (leaf >> (8 * level)).saturating_add(1) << (8 * level));
            let at = self.dirty_page((object, leaf), pointer, parent, level, floor)?;
            let slot = slot_of(leaf, level);
            pointer = self.pages.page(at).get(slot);
            parent = Parent::Page(self.pages.block(at), slot as u8);
            frame = Some(at);
        }
        Ok(frame.expect("there is at least one level"))
    }

    fn dirty_page(
        &mut self,
        (object, leaf): (Object, u64),
        pointer: Pointer,
        parent: Parent,
        level: u32,
        floor: Epoch,
    ) -> Result<FrameId, SpaceError> {
        let mut page = None;
        if !pointer.is_hole() {
            let found = self.pages.find(pointer.block()).expect("the path was found to be in memory");
            let ours = pointer.birth() > floor;
            if self.pages.is_dirty(found) {
                if ours {
                    return Ok(found);
                }
                // It is an ancestor's: its checksum, and those below, must be in their parents before the copy.
                self.finalize_nodes();
            }
            page = Some(Box::new(self.pages.page(found).clone()));
            if ours {
                self.pages.drop_page(pointer.block());
                self.space.free(pointer.block(), self.generation)?;
            }
        }
        let (block, _) = self
            .space
            .allocate(Use::Metadata, 1)
            .ok_or(SpaceError { block: Block::HOLE, found: "not to be had: no metadata space" })?;
        let named = Pointer::new(block, self.epoch, 0);
        match parent {
            Parent::Root(object) => self.set_root(object, named),
            Parent::Page(above, slot) => {
                let above = self.pages.find(above).expect("a dirty parent is in memory");
                self.pages.page_mut(above).set(usize::from(slot), named);
            }
        }
        let page = page.unwrap_or_else(|| Page::of_holes(pointer));
        Ok(self.pages.insert_dirty(block, page, (object, leaf), level, parent))
    }

    pub(super) fn finalize_nodes(&mut self) {
        let nodes = &mut self.nodes;
        self.pages.finalize(
            |object| matches!(object, Object::Node(_)),
            |object, block, crc| {
                if let Object::Node(node) = object
                    && let super::node::Root::Own(root) = nodes.slot(node).root
                    && root.block() == block
                {
                    nodes.set_root(node, root.with_crc(crc));
                }
            },
        );
    }

    /// Gives a node that inherits a root of its own, the same page as its ancestor's.
    pub fn materialize(&mut self, node: NodeId) {
        if self.nodes.slot(node).root == super::node::Root::Inherited {
            self.finalize_nodes();
            let root = self.nodes.root(node);
            if !root.is_hole() {
                self.nodes.set_root(node, root);
            }
        }
    }

    /// Lets `slot..` of `node` name the blocks of `extent`, which become used. [`prepare`](State::prepare) must
    /// have succeeded for the leaf.
    pub fn map(
        &mut self,
        node: NodeId,
        slot: u64,
        extent: Extent,
        birth: Epoch,
        crcs: &[u32],
    ) -> Result<(), SpaceError> {
        let leaf = slot / FANOUT as u64;
        let frame = self.dirty_path(Object::Node(node), leaf, 0)?;
        let floor = self.nodes.floor(node, leaf + 1);
        let (first, count) = ((slot % FANOUT as u64) as usize, crcs.len());
        self.space.claim(extent.block, count as u32)?;
        let State { pages, space, nodes, .. } = self;
        let old = || pages.page(frame).iter().skip(first).take(count).filter(|old| !old.is_hole());
        let own = old().filter(|old| old.birth() > floor);
        let freed = space.free_each(own.map(Pointer::block), self.generation)?;
        let named = old().count() as i64;
        let page = pages.page_mut(frame);
        for (i, crc) in crcs.iter().enumerate() {
            page.set(first + i, Pointer::new(extent.block.add(i as u64), birth, *crc));
        }
        let count = count as i64;
        nodes.count(node, count - named, count - freed);
        if named > freed {
            nodes.let_go(node, (named - freed) as u64);
        }
        Ok(())
    }

    /// Makes `count` slots from `slot` on holes; all lie in one leaf. Returns whether anything changed.
    /// [`prepare`](State::prepare) must have succeeded for the leaf.
    pub fn unmap(&mut self, node: NodeId, slot: u64, count: usize, birth: Epoch) -> Result<bool, SpaceError> {
        let (leaf, first) = (slot / FANOUT as u64, (slot % FANOUT as u64) as usize);
        let object = Object::Node(node);
        let root = self.nodes.root(node);
        let Ok(Some(found)) = self.find_leaf(object, root, leaf) else { return Ok(false) };
        let page = self.pages.page(found);
        let is_within = |slot: usize| (first..first + count).contains(&slot);
        // A leaf that names no block any more goes, also when earlier trims had made it so but for these slots.
        let empty = page.iter().enumerate().all(|(slot, pointer)| is_within(slot) || pointer.is_hole());
        if !empty && page.iter().skip(first).take(count).all(|pointer| pointer.is_hole()) {
            return Ok(false);
        }
        let floor = self.nodes.floor(node, leaf + 1);
        let old: Vec<Pointer> = self.pages.page(found).iter().skip(first).take(count).collect();
        let named = || old.iter().filter(|pointer| !pointer.is_hole());
        let referenced = -(named().count() as i64);
        let own = named().filter(|pointer| pointer.birth() > floor);
        let written = -self.free_data(own.map(|pointer| pointer.block()))?;
        let let_go = (written - referenced) as u64;
        if let_go > 0 {
            self.nodes.let_go(node, let_go);
        }
        if empty {
            let above = self.dirty_path(object, leaf, 1)?;
            let at = slot_of(leaf, 1);
            let pointer = self.pages.page(above).get(at);
            if pointer.birth() > floor {
                self.pages.drop_page(pointer.block());
                self.space.free(pointer.block(), self.generation)?;
            }
            let above = self.pages.find(self.pages.block(above)).expect("a dirty page is in memory");
            self.pages.page_mut(above).set(at, hole(birth));
        } else {
            let frame = self.dirty_path(object, leaf, 0)?;
            let page = self.pages.page_mut(frame);
            for (i, pointer) in old.iter().enumerate().filter(|(_, pointer)| !pointer.is_hole()) {
                debug_assert_eq!(page.get(first + i), *pointer);
                page.set(first + i, hole(birth));
            }
        }
        self.nodes.count(node, referenced, written);
        Ok(true)
    }

    /// Tells a volume's handles how far its use of space has changed from `before`.
    pub fn account(&mut self, volume: VolumeId, node: NodeId, before: u64) {
        let now = self.nodes.referenced(node);
        if now != before
            && let Some(volume) = self.volumes.get(&volume)
        {
            volume.referenced.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Frees blocks of data. Returns how many.
    pub fn free_data(&mut self, blocks: impl Iterator<Item = Block>) -> Result<i64, SpaceError> {
        self.space.free_each(blocks, self.generation)
    }

    /// Frees a block of a node that is being reaped, and its page if it was one.
    pub fn free_reaped(&mut self, pointer: Pointer) -> Result<(), SpaceError> {
        self.pages.drop_page(pointer.block());
        self.space.free(pointer.block(), self.generation)
    }

    /// Appends to the journal.
    pub fn record(&mut self, record: &Record) {
        self.journal.append(record);
    }

    /// Whether there is anything to commit.
    pub fn is_dirty(&self) -> bool {
        self.pages.waiting() > 0 || self.space.is_dirty() || self.nodes.dirty_blocks() > 0
    }

    /// Metadata blocks that [`begin_commit`](State::begin_commit) may take beyond those already taken.
    pub fn commit_needs(&self) -> u64 {
        // Node records with a path each; bitmaps of data regions changed and of any metadata region; the pages of
        // the bitmaps' tree: two of its upper levels may have as many as it has leaves, one for each device.
        let records = self.nodes.dirty_blocks() as u64 + 1;
        let (dirty, _, leaves) = self.space.shape();
        let metadata = self.space.metadata_regions();
        records * u64::from(LEVELS + 1) + dirty + metadata + 3 * leaves + 8
    }

    /// Turns all changes so far into a commit: checksums are filled in, records and bitmaps get their blocks. What
    /// comes after belongs to the next commit. The caller has checked [`commit_needs`](State::commit_needs).
    pub fn begin_commit(&mut self) -> Result<Plan, SpaceError> {
        self.finalize_nodes();
        let mut writes: Vec<(Block, Content)> = Vec::new();
        for index in self.nodes.take_dirty() {
            if !self.nodes.has_records(index) {
                self.drop_blob(Object::Nodes, index)?;
                continue;
            }
            let bytes = self.nodes.encode(index);
            let block = self.place_blob(Object::Nodes, index, crate::crc32c::crc32c(&bytes))?;
            writes.push((block, Content::Bytes(bytes)));
        }
        // Placing a bitmap changes bitmaps: go on until no further region has changed.
        let mut placed: BTreeSet<super::space::RegionId> = BTreeSet::new();
        loop {
            let fresh: Vec<_> = self.space.take_dirty().difference(&placed).copied().collect();
            if fresh.is_empty() {
                break;
            }
            for region in fresh {
                self.place_blob(Object::Space, region.0, 0)?;
                placed.insert(region);
            }
        }
        for region in placed {
            let Some(bytes) = self.space.encode(region) else { continue };
            let leaf = self.blob_leaf(Object::Space, region.0)?;
            let slot = region.0 as usize % FANOUT;
            let pointer = self.pages.page(leaf).get(slot).with_crc(crate::crc32c::crc32c(&bytes));
            self.pages.page_mut(leaf).set(slot, pointer);
            writes.push((pointer.block(), Content::Bytes(bytes)));
        }
        let (nodes_root, space_root) = (&mut self.nodes_root, &mut self.space_root);
        self.pages.finalize(
            |_| true,
            |object, block, crc| {
                let root = match object {
                    Object::Nodes => &mut *nodes_root,
                    _ => &mut *space_root,
                };
                if root.block() == block {
                    *root = root.with_crc(crc);
                }
            },
        );
        let pages = self.pages.take_final();
        writes.extend(pages.into_iter().map(|(block, page)| (block, Content::Page(page))));
        writes.sort_unstable_by_key(|(block, _)| *block);
        let journal = self.journal.begin_commit();
        let root = RootRecord {
            generation: self.generation,
            epoch: self.epoch,
            journal: journal.0,
            nodes: self.nodes_root,
            space: self.space_root,
            reaping: self.nodes.reaping(),
        };
        self.generation += 1;
        Ok(Plan { writes, root, journal })
    }

    /// Gives a record block or bitmap a new block; its old one is freed.
    fn place_blob(&mut self, object: Object, index: u32, crc: u32) -> Result<Block, SpaceError> {
        let leaf = u64::from(index) / FANOUT as u64;
        let slot = index as usize % FANOUT;
        let frame = self.dirty_path(object, leaf, 0)?;
        let old = self.pages.page(frame).get(slot);
        if !old.is_hole() {
            self.space.free(old.block(), self.generation)?;
        }
        let (block, _) = self
            .space
            .allocate(Use::Metadata, 1)
            .ok_or(SpaceError { block: Block::HOLE, found: "not to be had: no metadata space" })?;
        self.pages.page_mut(frame).set(slot, Pointer::new(block, self.epoch, crc));
        Ok(block)
    }

    fn blob_leaf(&mut self, object: Object, index: u32) -> Result<FrameId, SpaceError> {
        self.dirty_path(object, u64::from(index) / FANOUT as u64, 0)
    }

    /// Forgets the bitmap record of a region that is given back.
    pub fn drop_region_record(&mut self, region: super::space::RegionId) -> Result<(), SpaceError> {
        self.drop_blob(Object::Space, region.0)
    }

    /// Frees a record block or bitmap, if there is one.
    fn drop_blob(&mut self, object: Object, index: u32) -> Result<(), SpaceError> {
        let (leaf, slot) = (u64::from(index) / FANOUT as u64, index as usize % FANOUT);
        let root = self.root(object);
        if let Ok(Some(found)) = self.find_leaf(object, root, leaf)
            && !self.pages.page(found).get(slot).is_hole()
        {
            let frame = self.dirty_path(object, leaf, 0)?;
            let old = self.pages.page(frame).get(slot);
            self.pages.page_mut(frame).set(slot, Pointer::EMPTY);
            self.space.free(old.block(), self.generation)?;
        }
        Ok(())
    }
}

fn hole(birth: Epoch) -> Pointer {
    match is(Sabotage::ForgetHole) {
        true => Pointer::EMPTY,
        false => Pointer::hole(birth),
    }
}

/// The slot on the path to `leaf` in a page of `level`; level 0 has no meaning here but its first slot.
pub(super) fn slot_of(leaf: u64, level: u32) -> usize {
    match level {
        0 => 0,
        _ => (leaf >> (8 * (level - 1))) as usize % FANOUT,
    }
}
