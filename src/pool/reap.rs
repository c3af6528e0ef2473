//! What becomes of a deleted node in one shard.
//!
//! A deleted node that nobody grew from, or one alone, is *taken apart*: what it alone holds is freed, the rest is its
//! heir's. One that several others grew from is *thinned*: what it alone holds becomes holes in its own tree, and it
//! stays, as a ghost, with what those others share. A leaf that no other tree names is reached by pages that no other
//! tree names, so the ghost changes nothing but its own pages.
//!
//! A ghost keeps from being freed only what it owns. What it inherited was counted for it while it was whole; once its
//! [`ghost`](super::node::Lineage::ghost) mark is durable that is void, and the ghosts above may lose it.
//!
//! The position within a node is part of every commit, together with what was freed up to it: after a crash each goes on
//! where it was.
#![forbid(unsafe_code)]

use super::cache::{FrameId, Missing, Object};
use super::node::{NodeId, Root};
use super::pointer::{Epoch, FANOUT, LEAVES_MAX, LEVELS, Pointer};
use super::shard::Shard;
use super::space::{SpaceError, Use};
use super::tree::{Reserve, State, slot_of};
use super::walk::{Comparison, Place, STEPS_PER_TURN, Step};
use crate::device::IoError;

/// What one step of an adoption found.
struct Adoption {
    /// The first leaf not yet passed.
    next: u64,
    /// What the heir gets there.
    change: Change,
    /// Pages and blocks that are nobody's any more.
    freed: Vec<Pointer>,
    /// Of these, blocks of data.
    data: u64,
}

enum Change {
    Nothing,
    /// This pointer to a page of `level`, and all below it.
    Page {
        level: u32,
        pointer: Pointer,
    },
    /// These slots of a leaf page of its own.
    Slots(Vec<(usize, Pointer)>),
}

impl State {
    /// Makes holes of those blocks of a leaf that nobody else has, in the tree of a node that takes no more writes, and
    /// frees them. A leaf page with nothing left that the node owns goes too. [`prepare`](State::prepare) must have
    /// succeeded for the leaf.
    fn thin(&mut self, node: NodeId, leaf: u64, places: &[Place], floor: Epoch) -> Result<(), SpaceError> {
        let lone = |place: &Place| place.is_lone(floor);
        let owned = |place: &Place| !place.a.is_hole() && place.a.birth() > floor;
        let freed = places.iter().filter(|place| lone(place)).count() as i64;
        for place in places.iter().filter(|place| lone(place)) {
            self.space.free(place.a.block(), self.generation)?;
        }
        if !places.iter().any(|place| owned(place) && !lone(place)) {
            for level in 1..LEVELS {
                let above = self.dirty_path_of(node, leaf, level)?;
                let page = self.pages.page(above).get(slot_of(leaf, level));
                self.pages.page_mut(above).set(slot_of(leaf, level), Pointer::EMPTY);
                let empty = self.pages.page(above).iter().all(|pointer| pointer.is_hole());
                if page.birth() > floor {
                    self.free_reaped(page)?;
                }
                if !empty {
                    break;
                }
            }
            let named = places.iter().filter(|place| !place.a.is_hole()).count() as i64;
            self.nodes.count(node, -named, -freed);
        } else if freed > 0 {
            let frame = self.dirty_path_of(node, leaf, 0)?;
            for (slot, _) in places.iter().enumerate().filter(|(_, place)| lone(place)) {
                self.pages.page_mut(frame).set(slot, Pointer::EMPTY);
            }
            self.nodes.count(node, -freed, -freed);
        }
        Ok(())
    }

    /// As [`dirty_path`](State::dirty_path), for a node that takes no more writes: its pages are born in its last epoch.
    fn dirty_path_of(&mut self, node: NodeId, leaf: u64, lowest: u32) -> Result<FrameId, SpaceError> {
        let now = self.epoch;
        self.epoch = self.nodes.last_epoch(node).unwrap_or(now);
        let frame = self.dirty_path(Object::Node(node), leaf, lowest);
        self.epoch = now;
        frame
    }

    /// What the ghost `heir` lacks at leaf `cursor` to keep all that its parent `node` owns there.
    fn adoption(&mut self, node: NodeId, heir: NodeId, cursor: u64) -> Result<Adoption, Vec<Missing>> {
        let (floor, sealed) = (self.nodes.floor(node, LEAVES_MAX), self.nodes.last_epoch(node).unwrap_or(0));
        let owned = |a: Pointer| !a.is_hole() && a.birth() > floor;
        let heirs = |b: Pointer| !b.is_hole() && b.birth() > sealed;
        // What `b` inherited from the node may be void, and the node's own is right.
        let fixed = |a: Pointer, b: Pointer| match owned(a) {
            true => a,
            false if owned(b) => Pointer::EMPTY,
            false => b,
        };
        let (mut a, mut b) = (self.nodes.root(node), self.nodes.root(heir));
        let mut path: Vec<(u64, Pointer)> = Vec::new();
        let passed = |path: Vec<(u64, Pointer)>, next: u64| -> Vec<Pointer> {
            path.into_iter().filter(|(end, _)| *end == next).map(|(_, page)| page).collect()
        };
        for level in (0..LEVELS).rev() {
            let end = ((cursor >> (8 * level)) + 1) << (8 * level);
            if a.same_block(b) {
                let freed = passed(path, end);
                return Ok(Adoption { next: end, change: Change::Nothing, freed, data: 0 });
            }
            if !heirs(b) {
                let pointer = fixed(a, b);
                let change = match pointer == b {
                    true => Change::Nothing,
                    false => Change::Page { level, pointer },
                };
                return Ok(Adoption { next: end, change, freed: passed(path, end), data: 0 });
            }
            let mut missing = Vec::new();
            let mut frame = |node: NodeId, pointer: Pointer, wanted: bool| {
                let found = wanted.then(|| self.pages.find(pointer.block())).flatten();
                if wanted && found.is_none() {
                    missing.push(Missing { pointer, object: Object::Node(node), level });
                }
                found
            };
            let (frame_a, frame_b) = (frame(node, a, owned(a)), frame(heir, b, true));
            if !missing.is_empty() {
                return Err(missing);
            }
            if owned(a) {
                path.push((end, a));
            }
            let get = |frame: Option<FrameId>, slot: usize| {
                frame.map_or(Pointer::EMPTY, |frame| self.pages.page(frame).get(slot))
            };
            if level == 0 {
                let mut freed = passed(path, end);
                let (mut slots, mut data) = (Vec::new(), 0);
                for slot in 0..FANOUT {
                    let (a, b) = (get(frame_a, slot), get(frame_b, slot));
                    if a.same_block(b) {
                        continue;
                    }
                    if !heirs(b) {
                        let pointer = fixed(a, b);
                        slots.extend((pointer != b).then_some((slot, pointer)));
                    } else if owned(a) {
                        // The heir has overwritten it, so nobody below it has it.
                        freed.push(a);
                        data += 1;
                    }
                }
                let change = if slots.is_empty() { Change::Nothing } else { Change::Slots(slots) };
                return Ok(Adoption { next: end, change, freed, data });
            }
            let slot = slot_of(cursor, level);
            (a, b) = (get(frame_a, slot), get(frame_b, slot));
        }
        unreachable!("the loop ends at level 0")
    }

    /// Carries an adoption out. [`prepare_room`](State::prepare_room) must have succeeded.
    fn take_over(
        &mut self,
        node: NodeId,
        heir: NodeId,
        leaf: u64,
        found: Adoption,
    ) -> Result<(), SpaceError> {
        match found.change {
            Change::Nothing => {}
            Change::Page { level, pointer } if level + 1 == LEVELS => self.nodes.set_root(heir, pointer),
            Change::Page { level, pointer } => {
                let above = self.dirty_path_of(heir, leaf, level + 1)?;
                self.pages.page_mut(above).set(slot_of(leaf, level + 1), pointer);
            }
            Change::Slots(slots) => {
                let frame = self.dirty_path_of(heir, leaf, 0)?;
                for (slot, pointer) in slots {
                    self.pages.page_mut(frame).set(slot, pointer);
                }
            }
        }
        for pointer in found.freed {
            self.free_reaped(pointer)?;
        }
        self.nodes.count(node, -(found.data as i64), -(found.data as i64));
        self.nodes.pass(found.next);
        Ok(())
    }
}

impl Shard {
    /// Takes a deleted node apart: frees what neither its ancestors nor its one child `heir` hold; the rest is the
    /// heir's. Durable when it returns.
    pub async fn reap(&self, node: NodeId, heir: Option<NodeId>) -> Result<(), IoError> {
        let root = self.state.borrow().nodes.slot(node).root;
        match root {
            // An earlier attempt may have ended before its commit.
            Root::Reaped => {}
            Root::Inherited => self.state.borrow_mut().nodes.set_reaped(node),
            Root::Own(_) => {
                if let Some(heir) = heir {
                    self.state.borrow_mut().materialize(heir);
                }
                match heir {
                    Some(ghost) if self.state.borrow().nodes.is_ghost(ghost) => {
                        self.hand_down(node, ghost).await?;
                    }
                    _ => self.take_apart(node, heir).await?,
                }
                self.state.borrow_mut().nodes.set_reaped(node);
            }
        }
        self.commit().await
    }

    async fn take_apart(&self, node: NodeId, heir: Option<NodeId>) -> Result<(), IoError> {
        let (mut cursor, floor) = {
            let nodes = &mut self.state.borrow_mut().nodes;
            (nodes.begin_reaping(node, false), nodes.floor(node, LEAVES_MAX))
        };
        let what = Comparison { a: node, others: heir.as_slice(), floor, both: false };
        let mut steps = 0;
        while cursor < LEAVES_MAX {
            self.make_room_to_reap().await?;
            let step = self.step(what, cursor, &mut steps).await?;
            cursor = step.next;
            self.free_step(node, floor, step)?;
            self.ask_for_commit(steps);
        }
        Ok(())
    }

    /// Freeing changes bitmaps, and a commit must still find room for those.
    async fn make_room_to_reap(&self) -> Result<(), IoError> {
        loop {
            let short = {
                let state = self.state.borrow();
                state.space.free_blocks(Use::Metadata) < state.commit_needs_after()
            };
            match short {
                true => self.make_space(Use::Metadata).await?,
                false => return Ok(()),
            }
        }
    }

    fn ask_for_commit(&self, steps: u32) {
        if steps.is_multiple_of(STEPS_PER_TURN) && self.wants_commit() {
            self.wake.notify();
        }
    }

    /// Frees what a step found, and moves the position on, in one go: a commit sees both or neither.
    fn free_step(&self, node: NodeId, floor: Epoch, step: Step) -> Result<(), IoError> {
        let mut state = self.state.borrow_mut();
        let mut freed = 0;
        for place in step.leaf.into_iter().flatten().filter(|place| place.is_lone(floor)) {
            state.free_reaped(place.a).map_err(|error| self.fail_space(error))?;
            freed += 1;
        }
        for page in step.passed {
            state.free_reaped(page).map_err(|error| self.fail_space(error))?;
        }
        state.nodes.count(node, -freed, -freed);
        state.nodes.pass(step.next);
        Ok(())
    }

    /// Takes apart a node whose one child is a ghost: all that the node owns and the ghost does not hide becomes the
    /// ghost's, whether its own tree still names it or not.
    async fn hand_down(&self, node: NodeId, heir: NodeId) -> Result<(), IoError> {
        let mut cursor = {
            let mut state = self.state.borrow_mut();
            state.finalize_nodes();
            state.nodes.begin_reaping(node, false)
        };
        let mut steps = 0;
        while cursor < LEAVES_MAX {
            self.turn(&mut steps).await;
            self.check()?;
            let room = self.state.borrow().prepare_room(Reserve::Trim);
            if let Err(need) = room {
                self.meet(need).await?;
                continue;
            }
            let found = {
                let mut state = self.state.borrow_mut();
                state.adoption(node, heir, cursor).map(|found| {
                    let next = found.next;
                    state.take_over(node, heir, cursor, found).map(|()| next)
                })
            };
            match found {
                Ok(adopted) => cursor = adopted.map_err(|error| self.fail_space(error))?,
                Err(missing) => self.load_all(missing).await?,
            }
            self.ask_for_commit(steps);
        }
        Ok(())
    }

    /// Sees to it that a leaf of a deleted node's tree can be changed.
    async fn make_changeable(&self, node: NodeId, leaf: u64) -> Result<(), IoError> {
        loop {
            let ready = self.state.borrow_mut().prepare(Object::Node(node), leaf, Reserve::Trim);
            match ready {
                Ok(()) => return Ok(()),
                Err(need) => self.meet(need).await?,
            }
        }
    }

    /// Frees what a deleted node holds that none of the others does, and makes holes of it in its tree. Durable when it
    /// returns; [`end_reaping`](Shard::end_reaping) lets go of the position then.
    pub async fn thin(&self, node: NodeId) -> Result<(), IoError> {
        let (mut cursor, floor, others) = {
            let nodes = &mut self.state.borrow_mut().nodes;
            let cursor = nodes.begin_reaping(node, true);
            (cursor, nodes.floor(node, LEAVES_MAX), nodes.below(node))
        };
        if !matches!(self.state.borrow().nodes.slot(node).root, Root::Own(_)) {
            cursor = LEAVES_MAX;
        }
        let what = Comparison { a: node, others: &others, floor, both: false };
        let mut steps = 0;
        while cursor < LEAVES_MAX {
            let step = self.step(what, cursor, &mut steps).await?;
            if let Some(places) = step.leaf {
                self.make_changeable(node, cursor).await?;
                let thinned = self.state.borrow_mut().thin(node, cursor, &places, floor);
                thinned.map_err(|error| self.fail_space(error))?;
            }
            cursor = step.next;
            self.state.borrow_mut().nodes.pass(cursor);
            self.ask_for_commit(steps);
        }
        self.state.borrow_mut().nodes.pass(LEAVES_MAX);
        self.commit().await
    }

    /// The catalog knows that all was done that `node` called for.
    pub fn end_reaping(&self, node: NodeId) {
        let nodes = &mut self.state.borrow_mut().nodes;
        if nodes.reaping().is_some_and(|reaping| reaping.node == node) {
            nodes.set_reaping(None);
        }
    }
}
