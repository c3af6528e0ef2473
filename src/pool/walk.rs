//! The one walk: several trees side by side, skipping all that they share. Its cost is what differs, not what exists.
//!
//! It answers which blocks changed between two nodes ([`diff`](super::diff)), what a node alone holds
//! ([`Shard::unique`]), and it is how a deleted node is thinned and taken apart ([`reap`](super::reap)).
#![forbid(unsafe_code)]

use super::cache::{Missing, Object};
use super::node::NodeId;
use super::pointer::{Epoch, FANOUT, LEAVES_MAX, LEVELS, Pointer};
use super::shard::Shard;
use super::tree::State;
use crate::device::IoError;

/// Steps of a walk before it lets others run.
pub(super) const STEPS_PER_TURN: u32 = 16;

/// What is compared with what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comparison<'a> {
    /// The node walked.
    pub a: NodeId,
    /// Where any of these names the same block, the walk passes over it and all below.
    pub others: &'a [NodeId],
    /// Pages and blocks of `a` born at or before this epoch are passed over.
    pub floor: Epoch,
    /// Also visit leaves that only the first of the others has.
    pub both: bool,
}

/// One slot of a leaf that was visited.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// What `a` has there.
    pub a: Pointer,
    /// What the first of the others has there.
    pub b: Pointer,
    /// Whether any of the others has the same block there, or is a hole as `a` is.
    pub shared: bool,
}

impl Place {
    /// Whether there is a block born after `floor` that none of the others has.
    pub fn is_lone(&self, floor: Epoch) -> bool {
        !self.a.is_hole() && self.a.birth() > floor && !self.shared
    }
}

/// One step of a walk.
pub(super) struct Step {
    /// The first leaf not yet passed.
    pub next: u64,
    /// The leaf visited.
    pub leaf: Option<Vec<Place>>,
    /// Pages of `a` alone that end before `next`, lowest first.
    pub passed: Vec<Pointer>,
}

impl State {
    /// The step at leaf `cursor`, or the pages that must be in memory for it.
    fn step(&mut self, what: Comparison, cursor: u64) -> Result<Step, Vec<Missing>> {
        let mut a = self.nodes.root(what.a);
        let mut others: Vec<Pointer> = what.others.iter().map(|other| self.nodes.root(*other)).collect();
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
            let ours_in_a = !a.is_hole() && a.birth() > what.floor;
            let ours_in_b = what.both && others.first().is_some_and(|b| !b.is_hole());
            if !(ours_in_a || ours_in_b) || others.iter().any(|other| other.same_block(a)) {
                return Ok(Step { next: end, leaf: None, passed: passed(path, end) });
            }
            path.push((end, a));
            let mut missing = Vec::new();
            let mut frame = |node: NodeId, pointer: Pointer| match pointer.is_hole() {
                true => None,
                false => {
                    let found = self.pages.find(pointer.block());
                    if found.is_none() {
                        missing.push(Missing { pointer, object: Object::Node(node), level });
                    }
                    found
                }
            };
            let frame_a = frame(what.a, a);
            let frames: Vec<Option<usize>> =
                what.others.iter().zip(&others).map(|(node, pointer)| frame(*node, *pointer)).collect();
            if !missing.is_empty() {
                return Err(missing);
            }
            let get = |frame: Option<usize>, slot: usize| {
                frame.map_or(Pointer::EMPTY, |frame| self.pages.page(frame).get(slot))
            };
            if level == 0 {
                let place = |slot: usize| {
                    let a = get(frame_a, slot);
                    let b = frames.first().map_or(Pointer::EMPTY, |frame| get(*frame, slot));
                    Place { a, b, shared: frames.iter().any(|frame| get(*frame, slot).same_block(a)) }
                };
                let leaf = (0..FANOUT).map(place).collect();
                return Ok(Step { next: end, leaf: Some(leaf), passed: passed(path, end) });
            }
            let slot = (cursor >> (8 * (level - 1))) as usize % FANOUT;
            a = get(frame_a, slot);
            others = frames.into_iter().map(|frame| get(frame, slot)).collect();
        }
        unreachable!("the loop ends at level 0")
    }
}

impl Shard {
    /// Counts a step, and now and then lets others run.
    pub(super) async fn turn(&self, steps: &mut u32) {
        *steps += 1;
        if steps.is_multiple_of(STEPS_PER_TURN) {
            crate::reactor::yield_now().await;
        }
    }

    /// One step, and now and then a turn for others. Each step looks its way down from the roots anew, so nothing that
    /// it has seen needs to stay.
    pub(super) async fn step(
        &self,
        what: Comparison<'_>,
        cursor: u64,
        steps: &mut u32,
    ) -> Result<Step, IoError> {
        self.turn(steps).await;
        loop {
            self.check()?;
            let step = self.state.borrow_mut().step(what, cursor);
            match step {
                Ok(step) => return Ok(step),
                Err(missing) => self.load_all(missing).await?,
            }
        }
    }

    /// As [`step`](Shard::step), over what cannot be read in either copy: nothing below that is known, so nothing of it
    /// is freed, and a check names it as what nobody has. A device that fails otherwise, or that answers nothing, ends
    /// the walk: what it holds may be there again when it is.
    pub(super) async fn step_past_lost(
        &self,
        what: Comparison<'_>,
        cursor: u64,
        steps: &mut u32,
    ) -> Result<Step, IoError> {
        self.turn(steps).await;
        loop {
            self.check()?;
            let step = self.state.borrow_mut().step(what, cursor);
            let missing = match step {
                Ok(step) => return Ok(step),
                Err(missing) => missing,
            };
            if self.load_all(missing.clone()).await.is_ok() {
                continue;
            }
            for page in missing {
                match self.load(page).await {
                    Ok(()) => {}
                    Err(IoError::Unrecovered { .. }) => {
                        self.devices_answer().await?;
                        let next = ((cursor >> (8 * page.level)) + 1) << (8 * page.level);
                        return Ok(Step { next, leaf: None, passed: Vec::new() });
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// Blocks of data that nobody but `node` holds, ghosts aside: what deleting it would free.
    pub async fn unique(&self, node: NodeId) -> Result<u64, IoError> {
        let (floor, others) = self.state.borrow().nodes.around(node);
        let what = Comparison { a: node, others: &others, floor, both: false };
        let (mut count, mut cursor, mut steps) = (0, 0, 0);
        while cursor < LEAVES_MAX {
            let step = self.step(what, cursor, &mut steps).await?;
            count += step.leaf.into_iter().flatten().filter(|place| place.is_lone(floor)).count() as u64;
            cursor = step.next;
        }
        Ok(count)
    }
}
