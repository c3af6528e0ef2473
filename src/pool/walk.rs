//! The one walk: two trees side by side, skipping all that they share. Its cost is what differs, not what exists.
//!
//! It answers which blocks changed between two nodes ([`Shard::diff`]), what a node alone holds
//! ([`Shard::unique`]), and it is how a deleted node is taken apart ([`Shard::reap`]).
#![forbid(unsafe_code)]

use super::cache::{Missing, Object};
use super::node::{NodeId, Root};
use super::pointer::{Epoch, FANOUT, LEAVES_MAX, LEVELS, Pointer};
use super::shard::Shard;
use super::space::Use;
use super::tree::State;
use crate::device::IoError;

/// Steps of a walk before it lets others run.
const STEPS_PER_TURN: u32 = 16;

/// What is compared with what.
#[derive(Debug, Clone, Copy)]
struct Pair {
    a: NodeId,
    b: Option<NodeId>,
    /// Pages and blocks of `a` born at or before this epoch are passed over.
    floor: Epoch,
    /// Also visit leaves that only `b` has.
    both: bool,
}

/// One step of the walk.
struct Step {
    /// The first leaf not yet passed.
    next: u64,
    /// The leaf visited: its pointers in `a` and in `b`.
    leaf: Option<Vec<(Pointer, Pointer)>>,
    /// Pages of `a` alone that end before `next`, lowest first.
    passed: Vec<Pointer>,
}

impl State {
    fn step(&mut self, pair: Pair, cursor: u64) -> Result<Step, Missing> {
        let mut a = self.nodes.root(pair.a);
        let mut b = pair.b.map_or(Pointer::EMPTY, |b| self.nodes.root(b));
        let mut path: Vec<(u64, Pointer)> = Vec::new();
        let passed = |path: Vec<(u64, Pointer)>, next: u64| {
            path.into_iter()
                .rev()
                .filter(|(end, page)| *end == next && !page.is_hole())
                .map(|(_, page)| page)
                .collect()
        };
        for level in (0..LEVELS).rev() {
            let end = ((cursor >> (8 * level)) + 1) << (8 * level);
            let ours_in_a = !a.is_hole() && a.birth() > pair.floor;
            let ours_in_b = pair.both && !b.is_hole();
            if a.same_block(b) || !(ours_in_a || ours_in_b) {
                return Ok(Step { next: end, leaf: None, passed: passed(path, end) });
            }
            path.push((end, a));
            let object = Object::Node(pair.a);
            let mut frame = |pointer: Pointer| match pointer.is_hole() {
                true => Ok(None),
                false => self.pages.find(pointer.block()).ok_or(Missing { pointer, object, level }).map(Some),
            };
            let (frame_a, frame_b) = (frame(a)?, frame(b)?);
            let get = |frame: Option<usize>, slot: usize| {
                frame.map_or(Pointer::EMPTY, |frame| self.pages.page(frame).get(slot))
            };
            if level == 0 {
                let leaf = (0..FANOUT).map(|slot| (get(frame_a, slot), get(frame_b, slot))).collect();
                return Ok(Step { next: end, leaf: Some(leaf), passed: passed(path, end) });
            }
            let slot = (cursor >> (8 * (level - 1))) as usize % FANOUT;
            (a, b) = (get(frame_a, slot), get(frame_b, slot));
        }
        unreachable!("the loop ends at level 0")
    }
}

impl Shard {
    /// One step, and now and then a turn for others. Each step looks its way up from the roots anew, so nothing that it
    /// has seen needs to stay.
    async fn step(&self, pair: Pair, cursor: u64, steps: &mut u32) -> Result<Step, IoError> {
        *steps += 1;
        if steps.is_multiple_of(STEPS_PER_TURN) {
            crate::reactor::yield_now().await;
        }
        loop {
            self.check()?;
            let step = self.state.borrow_mut().step(pair, cursor);
            match step {
                Ok(step) => return Ok(step),
                Err(missing) => self.load(missing).await?,
            }
        }
    }

    /// Slots whose blocks differ between two nodes, as (first slot, count), in order.
    pub async fn diff(&self, a: NodeId, b: NodeId) -> Result<Vec<(u64, u64)>, IoError> {
        let pair = Pair { a, b: Some(b), floor: 0, both: true };
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let (mut cursor, mut steps) = (0, 0);
        while cursor < LEAVES_MAX {
            let step = self.step(pair, cursor, &mut steps).await?;
            for (slot, (a, b)) in step.leaf.into_iter().flatten().enumerate() {
                if a.same_block(b) {
                    continue;
                }
                let at = cursor * FANOUT as u64 + slot as u64;
                match ranges.last_mut() {
                    Some((first, count)) if *first + *count == at => *count += 1,
                    _ => ranges.push((at, 1)),
                }
            }
            cursor = step.next;
        }
        Ok(ranges)
    }

    /// Blocks of data that nobody but `node` holds: what deleting it would free.
    pub async fn unique(&self, node: NodeId) -> Result<u64, IoError> {
        let (floor, children, own) = {
            let state = self.state.borrow();
            let own = matches!(state.nodes.slot(node).root, Root::Own(_));
            (state.nodes.floor(node, LEAVES_MAX), state.nodes.children(node).collect::<Vec<_>>(), own)
        };
        if !own {
            return Ok(0);
        }
        let pair = Pair { a: node, b: children.first().copied(), floor, both: false };
        let (mut count, mut cursor, mut steps) = (0, 0, 0);
        while cursor < LEAVES_MAX {
            let step = self.step(pair, cursor, &mut steps).await?;
            if let Some(leaf) = step.leaf {
                let mut lone: Vec<bool> = leaf
                    .iter()
                    .map(|(a, b)| !a.is_hole() && a.birth() > floor && !a.same_block(*b))
                    .collect();
                for other in children.iter().skip(1) {
                    self.drop_shared(&mut lone, &leaf, *other, cursor).await?;
                }
                count += lone.into_iter().filter(|lone| *lone).count() as u64;
            }
            cursor = step.next;
        }
        Ok(count)
    }

    async fn drop_shared(
        &self,
        lone: &mut [bool],
        leaf: &[(Pointer, Pointer)],
        other: NodeId,
        at: u64,
    ) -> Result<(), IoError> {
        loop {
            let missing = {
                let mut state = self.state.borrow_mut();
                let root = state.nodes.root(other);
                match state.find_leaf(Object::Node(other), root, at) {
                    Ok(None) => return Ok(()),
                    Ok(Some(frame)) => {
                        for (slot, (a, _)) in leaf.iter().enumerate() {
                            lone[slot] &= !state.pages.page(frame).get(slot).same_block(*a);
                        }
                        return Ok(());
                    }
                    Err(missing) => missing,
                }
            };
            self.load(missing).await?;
        }
    }

    /// Takes a deleted node apart: frees what neither its ancestors nor its one child `heir` hold. Goes on where a
    /// crash interrupted it: the position is part of every commit, together with what was freed up to it. Durable
    /// when it returns.
    pub async fn reap(&self, node: NodeId, heir: Option<NodeId>) -> Result<(), IoError> {
        let root = self.state.borrow().nodes.slot(node).root;
        if root == Root::Reaped {
            // An earlier attempt may have ended before its commit.
            return self.commit().await;
        }
        if root == Root::Inherited {
            self.state.borrow_mut().nodes.set_reaped(node, 0);
            return self.commit().await;
        }
        let floor = {
            let mut state = self.state.borrow_mut();
            if let Some(heir) = heir {
                state.materialize(heir);
            }
            if state.nodes.reaping().is_none_or(|(reaping, _)| reaping != node) {
                state.nodes.set_reaping(Some((node, 0)));
            }
            state.nodes.floor(node, LEAVES_MAX)
        };
        let pair = Pair { a: node, b: heir, floor, both: false };
        let mut cursor = self.state.borrow().nodes.reaping().map_or(0, |(_, cursor)| cursor);
        let mut steps = 0;
        while cursor < LEAVES_MAX {
            self.make_room_to_reap().await?;
            let step = self.step(pair, cursor, &mut steps).await?;
            cursor = step.next;
            self.free_step(node, floor, step)?;
            if steps.is_multiple_of(STEPS_PER_TURN) && self.wants_commit() {
                self.wake.notify();
            }
        }
        self.state.borrow_mut().nodes.set_reaped(node, 0);
        self.commit().await
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

    /// Frees what a step found, and moves the position on, in one go: a commit sees both or neither.
    fn free_step(&self, node: NodeId, floor: Epoch, step: Step) -> Result<(), IoError> {
        let mut state = self.state.borrow_mut();
        let mut freed = 0;
        for (a, b) in step.leaf.into_iter().flatten() {
            if !a.is_hole() && a.birth() > floor && !a.same_block(b) {
                state.free_reaped(a).map_err(|error| self.fail_space(error))?;
                freed += 1;
            }
        }
        for page in step.passed {
            state.free_reaped(page).map_err(|error| self.fail_space(error))?;
        }
        state.nodes.count(node, -freed, -freed);
        state.nodes.set_reaping(Some((node, step.next)));
        Ok(())
    }
}
