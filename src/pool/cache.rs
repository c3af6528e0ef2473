//! The pages of one shard that are in memory, by block.
//!
//! A page is *clean* (as on the device), *dirty* (being changed in place; its block is allocated but its checksum is
//! not known yet), *final* (its checksum is in its parent; waits for the next commit), or *writing* (part of the
//! commit under way). Only clean pages of volumes may be dropped to make room.
//!
//! A dirty page's parent is always dirty too, up to the root; so checksums are filled in from the leaves upward
//! ([`Pages::finalize`]) and a page that is not dirty never changes again.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

use slab::Slab;

use super::node::NodeId;
use super::pointer::{Block, Page, Pointer};

/// Which tree a page belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// The map of a volume's head or a snapshot.
    Node(NodeId),
    /// The node records of the shard.
    Nodes,
    /// The region bitmaps of the shard.
    Space,
}

/// Who points at a dirty page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// The root pointer of its tree.
    Root(Object),
    /// Slot `.1` of the page in block `.0`.
    Page(Block, u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Clean,
    Dirty,
    Final,
    Writing,
}

/// A page in memory.
pub struct Frame {
    block: Block,
    page: Rc<Page>,
    /// The checksum of a dirty page that has not changed since [`Pages::sum_up`].
    crc: Option<u32>,
    state: State,
    object: Object,
    level: u32,
    /// Of a dirty page: a leaf on the path that it was made dirty for.
    leaf: u64,
    parent: Parent,
    used: bool,
}

/// Index of a frame; valid until the next call that may drop pages.
pub type FrameId = usize;

/// The pages in memory.
pub struct Pages {
    frames: Slab<Frame>,
    by_block: HashMap<Block, FrameId, BuildHasherDefault<NumberHasher>>,
    dirty: Vec<Block>,
    /// Where the dirty leaves of volumes are, or were: by node and leaf.
    leaves: HashMap<(NodeId, u64), FrameId, BuildHasherDefault<NumberHasher>>,
    ready: Vec<Block>,
    limit: usize,
    hand: usize,
}

impl Pages {
    /// Keeps about `limit` clean pages.
    pub fn new(limit: usize) -> Pages {
        Pages {
            frames: Slab::new(),
            by_block: HashMap::default(),
            dirty: Vec::new(),
            leaves: HashMap::default(),
            ready: Vec::new(),
            limit: limit.max(64),
            hand: 0,
        }
    }

    /// The page in `block`, if it is in memory.
    pub fn find(&mut self, block: Block) -> Option<FrameId> {
        let id = *self.by_block.get(&block)?;
        self.frames[id].used = true;
        Some(id)
    }

    /// The page of a frame.
    pub fn page(&self, id: FrameId) -> &Page {
        &self.frames[id].page
    }

    /// The page of a dirty frame, to be changed.
    pub fn page_mut(&mut self, id: FrameId) -> &mut Page {
        let frame = &mut self.frames[id];
        assert!(frame.state == State::Dirty, "only a dirty page changes");
        frame.crc = None;
        Rc::make_mut(&mut frame.page)
    }

    /// The block of a frame.
    pub fn block(&self, id: FrameId) -> Block {
        self.frames[id].block
    }

    /// Whether a frame is dirty.
    pub fn is_dirty(&self, id: FrameId) -> bool {
        self.frames[id].state == State::Dirty
    }

    /// The page of a leaf, if it is dirty: then the whole path to it is.
    pub fn dirty_leaf(&self, object: Object, leaf: u64) -> Option<FrameId> {
        let Object::Node(node) = object else { return None };
        let id = *self.leaves.get(&(node, leaf))?;
        let frame = self.frames.get(id)?;
        let same = (frame.object, frame.level, frame.leaf) == (object, 0, leaf);
        (same && frame.state == State::Dirty).then_some(id)
    }

    /// Whether what is in `block` on the device is all there is of it: no page in memory is ahead of it.
    pub fn is_stored(&self, block: Block) -> bool {
        self.by_block.get(&block).is_none_or(|id| self.frames[*id].state == State::Clean)
    }

    /// The pages in memory that are ahead of the device.
    pub fn unstored(&self) -> impl Iterator<Item = (Block, &Page)> + '_ {
        self.frames
            .iter()
            .filter(|(_, frame)| frame.state != State::Clean)
            .map(|(_, frame)| (frame.block, &*frame.page))
    }

    /// Clean pages that are kept.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Pages that wait for a commit.
    pub fn waiting(&self) -> usize {
        self.dirty.len() + self.ready.len()
    }

    /// Adds a page read from the device; one that is there already stays.
    pub fn insert_clean(&mut self, block: Block, page: Box<Page>, object: Object, level: u32) {
        self.insert_clean_all(vec![(Missing { pointer: Pointer::new(block, 0, 0), object, level }, page)]);
    }

    /// Adds pages that are wanted together: none of them makes way for another.
    pub fn insert_clean_all(&mut self, pages: Vec<(Missing, Box<Page>)>) {
        self.make_room(pages.len());
        for (Missing { pointer, object, level }, page) in pages {
            let block = pointer.block();
            if !self.by_block.contains_key(&block) {
                let parent = Parent::Root(object);
                let page = page.into();
                let state = State::Clean;
                self.put(Frame { block, page, crc: None, state, object, level, leaf: 0, parent, used: true });
            }
        }
    }

    /// Adds a new dirty page, on the path to `leaf`.
    pub fn insert_dirty(
        &mut self,
        block: Block,
        page: Box<Page>,
        (object, leaf): (Object, u64),
        level: u32,
        parent: Parent,
    ) -> FrameId {
        self.drop_page(block);
        self.dirty.push(block);
        let (page, state) = (page.into(), State::Dirty);
        let id = self.put(Frame { block, page, crc: None, state, object, level, leaf, parent, used: true });
        if let (Object::Node(node), 0) = (object, level) {
            self.leaves.insert((node, leaf), id);
        }
        id
    }

    fn put(&mut self, frame: Frame) -> FrameId {
        let block = frame.block;
        let id = self.frames.insert(frame);
        self.by_block.insert(block, id);
        id
    }

    /// Forgets the page in `block`: it was freed.
    pub fn drop_page(&mut self, block: Block) {
        if let Some(id) = self.by_block.remove(&block) {
            self.frames.remove(id);
        }
    }

    /// Fills in the checksums of all dirty pages that `which` chooses, leaves first; they are final then.
    /// `set_root` gets the root pointers' checksums.
    pub fn finalize(&mut self, which: impl Fn(Object) -> bool, mut set_root: impl FnMut(Object, Block, u32)) {
        let mut chosen: Vec<(u32, Block)> = Vec::new();
        self.leaves.retain(|(node, _), _| !which(Object::Node(*node)));
        self.dirty.retain(|block| {
            let Some(frame) = self.by_block.get(block).map(|id| &self.frames[*id]) else { return false };
            if frame.state != State::Dirty {
                return false;
            }
            if which(frame.object) {
                chosen.push((frame.level, *block));
                return false;
            }
            true
        });
        chosen.sort_unstable();
        chosen.dedup();
        for (_, block) in chosen {
            let Some(frame) = self.by_block.get(&block).map(|id| &mut self.frames[*id]) else { continue };
            frame.state = State::Final;
            let (crc, parent) = (frame.crc.unwrap_or_else(|| frame.page.crc()), frame.parent);
            self.ready.push(block);
            match parent {
                Parent::Root(object) => set_root(object, block, crc),
                Parent::Page(above, slot) => {
                    let Some(above) = self.by_block.get(&above).map(|id| &mut self.frames[*id]) else {
                        continue;
                    };
                    let pointer = above.page.get(usize::from(slot));
                    if pointer.block() == block {
                        above.crc = None;
                        Rc::make_mut(&mut above.page).set(usize::from(slot), pointer.with_crc(crc));
                    }
                }
            }
        }
    }

    /// Works out the checksums of up to `count` dirty leaf pages, from the `from`th dirty page on, so that
    /// [`finalize`](Pages::finalize) need not. Returns where to go on; `None` at the end.
    pub fn sum_up(&mut self, from: usize, count: usize) -> Option<usize> {
        let upto = self.dirty.len().min(from + count);
        for block in self.dirty.get(from..upto)? {
            if let Some(frame) = self.by_block.get(block).map(|id| &mut self.frames[*id])
                && (frame.state, frame.level, frame.crc) == (State::Dirty, 0, None)
            {
                frame.crc = Some(frame.page.crc());
            }
        }
        (upto < self.dirty.len()).then_some(upto)
    }

    /// Hands out all final pages to be written; each stays in memory until [`written`](Pages::written).
    pub fn take_final(&mut self) -> Vec<(Block, Rc<Page>)> {
        let mut out = Vec::with_capacity(self.ready.len());
        for block in std::mem::take(&mut self.ready) {
            if let Some(frame) = self.by_block.get(&block).map(|id| &mut self.frames[*id])
                && frame.state == State::Final
            {
                frame.state = State::Writing;
                out.push((block, Rc::clone(&frame.page)));
            }
        }
        out
    }

    /// The pages of a commit are on the device.
    pub fn written(&mut self, blocks: impl Iterator<Item = Block>) {
        for block in blocks {
            if let Some(frame) = self.by_block.get(&block).map(|id| &mut self.frames[*id])
                && frame.state == State::Writing
            {
                frame.state = State::Clean;
            }
        }
    }

    /// Drops clean pages of volumes that were not used lately until `count` more keep to the limit (one sweep at most).
    fn make_room(&mut self, count: usize) {
        let mut left = self.frames.capacity();
        while self.frames.len() + count > self.limit && left > 0 {
            left -= 1;
            self.hand = (self.hand + 1) % self.frames.capacity();
            let Some(frame) = self.frames.get_mut(self.hand) else { continue };
            if frame.state != State::Clean || !matches!(frame.object, Object::Node(_)) {
                continue;
            }
            if std::mem::take(&mut frame.used) {
                continue;
            }
            let block = frame.block;
            self.drop_page(block);
        }
    }
}

/// One multiplication: block numbers are already well spread over their low bits.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

/// A pointer that must be read from the device before an operation can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// What to read.
    pub pointer: Pointer,
    /// Which tree it is in.
    pub object: Object,
    /// Its level.
    pub level: u32,
}
