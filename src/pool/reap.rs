//! What becomes of a deleted node in one shard.
//!
//! A deleted node that nobody grew from, or one whole node alone, is *taken apart*: what it alone holds is freed, the
//! rest is its heir's. One that several others grew from is *thinned*: what it alone holds becomes holes in its own tree,
//! and it stays, as a ghost, with what those others share. A leaf that no other tree names is reached by pages that no
//! other tree names, so the ghost changes nothing but its own pages.
//!
//! A ghost keeps from being freed only what it owns. What it inherited was counted for it while it was whole; once its
//! [`ghost`](super::node::Lineage::ghost) mark is durable that is void, and the ghosts above may lose it. So a ghost can
//! be nobody's heir: in its tree there is no room for what those below it need of the node above, as its pages are theirs
//! too. A node whose one child is a ghost becomes a ghost itself, until that one is gone.
//!
//! The position within a node is part of every commit, together with what was freed up to it: after a crash each goes on
//! where it was.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::cache::{FrameId, Object};
use super::node::{NodeId, Root};
use super::pointer::{Epoch, LEAVES_MAX, LEVELS, Pointer};
use super::shard::Shard;
use super::space::{SpaceError, Use};
use super::tree::{Reserve, State, slot_of};
use super::walk::{Comparison, Place, STEPS_PER_TURN, Step};
use crate::device::IoError;

/// How long a shard that serves hosts waits after so many leaves, of up to 1 MiB each: one alone still gives back more
/// than 1 GiB in a second.
const PAUSE: Duration = Duration::from_millis(5);
const LEAVES_PER_PAUSE: u32 = 4;

impl State {
    /// Makes holes of those blocks of a leaf that nobody else has, in the tree of a node that takes no more writes, and
    /// frees them. A leaf page with nothing left that the node owns goes too. [`prepare`](State::prepare) must have
    /// succeeded for the leaf.
    fn thin(&mut self, node: NodeId, leaf: u64, places: &[Place], floor: Epoch) -> Result<(), SpaceError> {
        let lone = |place: &Place| place.is_lone(floor);
        let owned = |place: &Place| !place.a.is_hole() && place.a.birth() > floor;
        let freed = self.free_data(places.iter().filter(|place| lone(place)).map(|place| place.a.block()))?;
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
}

impl Shard {
    /// Takes a deleted node apart that one other at most grew from: frees what neither its ancestors nor that one, its
    /// heir, hold; the rest is the heir's. Durable when it returns.
    pub async fn reap(&self, node: NodeId) -> Result<(), IoError> {
        let (root, heir) = {
            let nodes = &self.state.borrow().nodes;
            (nodes.slot(node).root, nodes.heirs(node).first().copied())
        };
        match root {
            // An earlier attempt may have ended before its commit.
            Root::Reaped => {}
            Root::Inherited => self.state.borrow_mut().nodes.set_reaped(node),
            Root::Own(_) => {
                if let Some(heir) = heir {
                    self.state.borrow_mut().materialize(heir);
                }
                self.take_apart(node, heir).await?;
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
        let (mut steps, mut served) = (0, self.served.get());
        while cursor < LEAVES_MAX {
            self.make_room_to_reap().await?;
            let step = self.step_past_lost(what, cursor, &mut steps).await?;
            cursor = step.next;
            self.free_step(node, floor, step)?;
            self.ask_for_commit(steps);
            self.give_way(steps, &mut served).await;
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

    /// A pause now and then, when hosts have read or written since the last: they get nearly all of the reactor's time,
    /// and fewer than one request in a hundred meets such steps. Where new writes wait for the space, none: a full pool
    /// is worse for them.
    async fn give_way(&self, steps: u32, served: &mut u64) {
        if !steps.is_multiple_of(LEAVES_PER_PAUSE) {
            return;
        }
        let before = std::mem::replace(served, self.served.get());
        if *served != before && !self.scarce.get() && !self.full.get() {
            crate::reactor::sleep(PAUSE).await;
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
        let lone = step.leaf.iter().flatten().filter(|place| place.is_lone(floor));
        let freed =
            state.free_data(lone.map(|place| place.a.block())).map_err(|error| self.fail_space(error))?;
        for page in step.passed {
            state.free_reaped(page).map_err(|error| self.fail_space(error))?;
        }
        state.nodes.count(node, -freed, -freed);
        state.nodes.pass(step.next);
        Ok(())
    }

    /// Sees to it that a leaf of a deleted node's tree can be changed.
    async fn make_changeable(&self, node: NodeId, leaf: u64) -> Result<(), IoError> {
        loop {
            let ready = self.state.borrow_mut().prepare(Object::Node(node), leaf, Reserve::Reap);
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
        let (mut steps, mut served) = (0, self.served.get());
        while cursor < LEAVES_MAX {
            let step = self.step_past_lost(what, cursor, &mut steps).await?;
            if let Some(places) = step.leaf {
                self.make_changeable(node, cursor).await?;
                let thinned = self.state.borrow_mut().thin(node, cursor, &places, floor);
                thinned.map_err(|error| self.fail_space(error))?;
            }
            cursor = step.next;
            self.state.borrow_mut().nodes.pass(cursor);
            self.ask_for_commit(steps);
            self.give_way(steps, &mut served).await;
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
