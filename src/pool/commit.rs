//! The commit: dirty pages go to fresh blocks, then the root slot changes, then the journal's tail moves.
//!
//! ```text
//! pages, records, bitmaps (both copies)  →  flush  →  root slot (both copies)  →  flush  →  freed blocks are free
//! ```
//!
//! The first flush must come before the root slot: a root that names pages which are not there loses everything.
//! The second must come before anything freed is written again, and before the journal before it is written over.
//! A crash at any point leaves the old root, or the new one, each with its own journal tail.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::time::Duration;

use super::pointer::{BLOCK_BYTES, Block};
use super::sabotage::{Sabotage, is};
use super::shard::Shard;
use super::space::{Ask, Use};
use super::tree::{Content, Plan};
use crate::device::IoError;
use crate::memory::DmaBuf;

/// How long changes wait in the journal alone.
const INTERVAL: Duration = Duration::from_secs(2);
/// How often such a wait is drawn out while hosts keep the shard busy: a page then goes to the device for more writes.
const PUT_OFF_MAX: u32 = 4;
/// Operations in an interval that make it busy.
const BUSY: u64 = 2000;
/// Wholly free data regions that a shard keeps when it gives others back.
const EMPTY_KEPT: usize = 2;
/// Commits for which a shard keeps metadata blocks when it gives regions back.
const METADATA_KEPT: u64 = 4;
/// The largest single write of a commit, in blocks.
const RUN_BLOCKS: usize = 32;
/// Such writes side by side.
const RUNS_AT_ONCE: usize = 8;
/// Checksums worked out before others get a turn.
const SUMS_PER_TURN: usize = 64;

/// Whether a commit can be begun.
enum Readiness {
    Nothing,
    Ready,
    Short,
}

/// Commits asked for, and what became of them.
#[derive(Default)]
pub(super) struct Requests {
    /// The committer is at work: it alone commits.
    attended: Cell<bool>,
    asked: Cell<u64>,
    done: Cell<u64>,
    last: RefCell<Option<IoError>>,
}

impl Shard {
    /// Makes everything so far part of the committed state. Once the committer runs, it does the work: whoever asked may
    /// go away meanwhile.
    pub async fn commit(&self) -> Result<(), IoError> {
        let requests = &self.commits;
        if !requests.attended.get() {
            return self.commit_now().await;
        }
        let ticket = requests.asked.get() + 1;
        requests.asked.set(ticket);
        self.wake.notify();
        while requests.done.get() < ticket {
            self.check()?;
            self.changed.wait().await;
        }
        requests.last.borrow().clone().map_or(Ok(()), Err)
    }

    async fn commit_now(&self) -> Result<(), IoError> {
        let _lock = self.commit_lock.acquire(1).await;
        self.sum_up().await;
        let mut grown = true;
        loop {
            self.check()?;
            if self.commit_hold.get() > 0 {
                self.changed.wait().await;
                continue;
            }
            match self.commit_readiness() {
                Readiness::Nothing => return Ok(()),
                Readiness::Ready => break,
                Readiness::Short if grown => grown = self.grow(Use::Metadata, Ask::Needed).await,
                Readiness::Short => return Err(IoError::CapacityExceeded),
            }
        }
        let plan = self.state.borrow_mut().begin_commit().map_err(|error| self.fail_space(error))?;
        self.commit_covers.set(plan.journal.1);
        let written = self.patiently("a commit", || self.write_commit(&plan)).await;
        self.commit_covers.set(0);
        if written.is_err() {
            return Err(self.fail("a commit could not be written"));
        }
        let mut state = self.state.borrow_mut();
        state.journal.end_commit(plan.journal);
        state.pages.written(plan.writes.iter().map(|(block, _)| *block));
        drop(state);
        self.durable_generation.set(plan.root.generation);
        self.committed.set(Some(plan.root));
        self.replayed.set(false);
        self.release();
        self.changed.notify();
        Ok(())
    }

    /// Works out checksums that the commit will need, a few at a time: what changes meanwhile, and only that, is left for
    /// the moment in which nothing else can happen.
    async fn sum_up(&self) {
        let mut next = Some(0);
        while let Some(from) = next {
            next = self.state.borrow_mut().pages.sum_up(from, SUMS_PER_TURN);
            crate::reactor::yield_now().await;
        }
    }

    fn commit_readiness(&self) -> Readiness {
        let state = self.state.borrow();
        if !state.is_dirty() && state.journal.is_empty() {
            return Readiness::Nothing;
        }
        match state.space.free_blocks(Use::Metadata) >= state.commit_needs() {
            true => Readiness::Ready,
            false => Readiness::Short,
        }
    }

    async fn write_commit(&self, plan: &Plan) -> Result<(), IoError> {
        let mut start = 0;
        let mut runs = Vec::new();
        for end in 1..=plan.writes.len() {
            let contiguous = end < plan.writes.len()
                && end - start < RUN_BLOCKS
                && plan.writes[end].0.raw() == plan.writes[end - 1].0.raw() + 1
                && self.geometry.region_of(plan.writes[end].0).map(|(region, _)| region)
                    == self.geometry.region_of(plan.writes[end - 1].0).map(|(region, _)| region);
            if !contiguous {
                runs.push(&plan.writes[start..end]);
                start = end;
            }
        }
        // A few runs at a time, so that hosts are served meanwhile.
        for some in runs.chunks(RUNS_AT_ONCE) {
            for result in super::join::all(some.iter().map(|run| self.write_run(run))).await {
                result?;
            }
            crate::reactor::yield_now().await;
        }
        if !is(Sabotage::RootFirst) {
            self.flush_devices().await?;
        }
        let root = plan.root.encode(self.pool, self.index);
        let writes = self.copies().into_iter().enumerate().map(|(copy, device)| {
            let block = self.geometry.root_slot(copy as u64, self.index, plan.root.generation % 2);
            device.write(block * BLOCK_BYTES as u64, DmaBuf::copy_of(&root).freeze())
        });
        for written in super::join::all(writes).await {
            written?;
        }
        self.flush_devices().await
    }

    async fn write_run(&self, run: &[(Block, Content)]) -> Result<(), IoError> {
        let first = run[0].0;
        let mut buf = DmaBuf::uninit(run.len() * BLOCK_BYTES);
        for ((_, content), out) in run.iter().zip(buf.chunks_exact_mut(BLOCK_BYTES)) {
            out.copy_from_slice(content.bytes());
        }
        let data = buf.freeze();
        let second = self.state.borrow().space.twin(first).filter(|_| !is(Sabotage::OneCopy));
        let mut writes = Vec::with_capacity(2);
        for block in [Some(first), second].into_iter().flatten() {
            writes.push(self.device(block)?.write(block.offset(), data.clone()));
        }
        super::join::all(writes.into_iter()).await.into_iter().collect()
    }

    /// Whether it is time for a commit without waiting for the interval.
    pub(super) fn wants_commit(&self) -> bool {
        let state = self.state.borrow();
        let (free, held) = (state.space.free_blocks(Use::Data), state.space.held_blocks(Use::Data));
        // The more writes a page takes in before it is written, the less is written; a quarter is left for those that
        // come during the commit.
        state.pages.waiting() > state.pages.limit() / 4 * 3
            || state.journal.room() < state.journal.size() / 2
            || (held > 256 && free < held && !self.is_pinned())
    }

    /// The committer: runs until the shard is closed.
    pub(super) async fn keep_committed(&self) {
        let requests = &self.commits;
        requests.attended.set(true);
        let mut pause = INTERVAL;
        let (mut put_off, mut served) = (0, 0);
        while !self.closed.get() {
            if requests.asked.get() == requests.done.get() {
                let woken =
                    crate::reactor::with_deadline(crate::reactor::now() + pause, self.wake.wait()).await;
                let busy = self.served.get() - std::mem::replace(&mut served, self.served.get()) > BUSY;
                if woken.is_none() && busy && put_off < PUT_OFF_MAX {
                    put_off += 1;
                    continue;
                }
            }
            put_off = 0;
            let covers = requests.asked.get();
            let done = self.commit_now().await;
            *requests.last.borrow_mut() = done.clone().err();
            requests.done.set(covers);
            self.changed.notify();
            if self.check().is_err() {
                break;
            }
            match done {
                Ok(()) => {
                    pause = INTERVAL;
                    self.return_regions().await;
                }
                Err(IoError::CapacityExceeded) => {
                    tracing::warn!("shard {} has no room for a commit; it is tried again", self.index);
                    pause = 2 * INTERVAL;
                }
                Err(error) => {
                    self.report(format!("commit of shard {}: {error}", self.index));
                    pause = 2 * INTERVAL;
                }
            }
        }
        requests.attended.set(false);
        if requests.done.replace(requests.asked.get()) != requests.asked.get() {
            // Nobody made what was asked for since: it must not pass for durable.
            *requests.last.borrow_mut() = Some(IoError::Gone);
        }
        self.changed.notify();
    }

    /// Gives regions back that hold nothing, once a commit without them is durable.
    async fn return_regions(&self) {
        if self.commit_hold.get() > 0 || self.check().is_err() {
            return;
        }
        let (regions, dropped) = {
            let mut state = self.state.borrow_mut();
            if state.space.free_blocks(Use::Metadata) < 2 * state.commit_needs() {
                return;
            }
            let mut regions = state.space.take_empty(64, EMPTY_KEPT);
            let kept = METADATA_KEPT * state.commit_needs_at_most();
            regions.extend(state.space.take_empty_metadata(kept));
            let dropped: Result<Vec<()>, _> =
                regions.iter().map(|region| state.drop_region_record(*region)).collect();
            (regions, dropped)
        };
        if regions.is_empty() {
            return;
        }
        if let Err(error) = dropped {
            self.fail_space(error);
            return;
        }
        if self.commit_now().await.is_ok() {
            self.give_back(regions).await;
        }
    }
}
