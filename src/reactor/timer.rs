//! Timers of one executor: a heap of deadlines over recycled entries.
//!
//! A cancelled timer's entry is reused at once; its heap node stays until it would be due, or until dead
//! nodes are the majority and the heap is swept.

#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::task::Waker;
use std::time::Instant;

/// Names one armed timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TimerKey {
    entry: u32,
    generation: u32,
}

struct Entry {
    generation: u32,
    waker: Option<Waker>,
}

#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u64, u32, u32)>>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    sequence: u64,
}

const SWEEP_AT_LEAST: usize = 64;

impl Timers {
    pub(super) fn arm(&mut self, deadline: Instant, waker: Waker) -> TimerKey {
        let entry = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, waker: None });
            (self.entries.len() - 1) as u32
        });
        let slot = &mut self.entries[entry as usize];
        slot.waker = Some(waker);
        let generation = slot.generation;
        self.sequence += 1;
        self.heap.push(Reverse((deadline, self.sequence, entry, generation)));
        TimerKey { entry, generation }
    }

    /// Changes who is woken. False when the timer has fired already.
    pub(super) fn update(&mut self, key: TimerKey, waker: &Waker) -> bool {
        let slot = &mut self.entries[key.entry as usize];
        if slot.generation != key.generation {
            return false;
        }
        match &mut slot.waker {
            Some(old) => old.clone_from(waker),
            None => slot.waker = Some(waker.clone()),
        }
        true
    }

    pub(super) fn cancel(&mut self, key: TimerKey) {
        if self.entries[key.entry as usize].generation != key.generation {
            return;
        }
        self.release(key.entry);
        let live = self.entries.len() - self.free.len();
        if self.heap.len() > SWEEP_AT_LEAST && self.heap.len() > 2 * live {
            let entries = &self.entries;
            self.heap.retain(|Reverse((_, _, entry, generation))| {
                entries[*entry as usize].generation == *generation
            });
        }
    }

    fn release(&mut self, entry: u32) -> Option<Waker> {
        let slot = &mut self.entries[entry as usize];
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(entry);
        slot.waker.take()
    }

    /// The earliest deadline of a live timer.
    pub(super) fn next_deadline(&mut self) -> Option<Instant> {
        loop {
            let Reverse((deadline, _, entry, generation)) = *self.heap.peek()?;
            if self.entries[entry as usize].generation == generation {
                return Some(deadline);
            }
            self.heap.pop();
        }
    }

    /// Moves the wakers of all timers due at `now` to `woken`, earliest first.
    pub(super) fn take_due(&mut self, now: Instant, woken: &mut Vec<Waker>) {
        while let Some(Reverse((deadline, _, entry, generation))) = self.heap.peek().copied() {
            if deadline > now {
                break;
            }
            self.heap.pop();
            if self.entries[entry as usize].generation == generation {
                woken.extend(self.release(entry));
            }
        }
    }
}
