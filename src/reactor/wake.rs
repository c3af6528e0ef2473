//! Waking tasks: from their own thread through a plain queue, from other threads through a bitmap.
//!
//! A task's waker lives as long as its slot and serves every task that ever occupies the slot, so making
//! wakers allocates nothing in steady state; a stale waker costs one spurious poll. A wake on the executor's
//! own thread touches no atomics. A wake from elsewhere sets one bit of a three-level bitmap (which also
//! drops duplicates), then kicks the executor if it sleeps. There is no lock anywhere.
//!
//! The race that matters is a wake against falling asleep. The sleeper says so first and looks second
//! ([`Remote::prepare_sleep`]); the waker sets its bits first and looks for a sleeper second. All of these
//! are sequentially consistent, so one of the two sees the other.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};
use std::task::{Wake, Waker};

use super::atomic::{AtomicBool, AtomicU64};
use super::executor;

const SEGMENTS: usize = 64;
const SLOTS_PER_SEGMENT: usize = 64 * 64;

/// Tasks one executor can hold.
pub(super) const MAX_TASKS: usize = SEGMENTS * SLOTS_PER_SEGMENT;

struct Segment {
    /// Bit n: words[n] may be non-zero.
    summary: AtomicU64,
    words: [AtomicU64; 64],
}

/// The side of an executor that other threads see.
pub(super) struct Remote {
    id: u64,
    /// Something is in the bitmap or in the inbox.
    signal: AtomicBool,
    /// Bit n: segments[n] may hold wakes.
    top: AtomicU64,
    segments: [OnceLock<Box<Segment>>; SEGMENTS],
    sleeping: AtomicBool,
    kick: Box<dyn Fn() + Send + Sync>,
}

impl Remote {
    /// `kick` must make the executor's thread leave its sleep, and be callable from any thread.
    pub(super) fn new(id: u64, kick: Box<dyn Fn() + Send + Sync>) -> Remote {
        Remote {
            id,
            signal: AtomicBool::new(false),
            top: AtomicU64::new(0),
            segments: [const { OnceLock::new() }; SEGMENTS],
            sleeping: AtomicBool::new(false),
            kick,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Marks a task as woken. Any thread.
    fn wake(&self, slot: u32) {
        let (segment, word, bit) = split(slot);
        let Some(entry) = self.segments[segment].get() else { return };
        entry.words[word].fetch_or(1 << bit, SeqCst);
        // A summary bit that is still set will be taken, and its word read, after this word was written.
        if entry.summary.load(SeqCst) & (1 << word) == 0 {
            entry.summary.fetch_or(1 << word, SeqCst);
        }
        if self.top.load(SeqCst) & (1 << segment) == 0 {
            self.top.fetch_or(1 << segment, SeqCst);
        }
        self.signal();
    }

    /// Tells the executor to look at its bitmap and inbox, waking it if it sleeps. Any thread.
    pub(super) fn signal(&self) {
        self.signal.store(true, SeqCst);
        if self.sleeping.load(SeqCst) && self.sleeping.swap(false, SeqCst) {
            (self.kick)();
        }
    }

    /// Whether anything was signalled since the last call. Executor thread only.
    pub(super) fn take_signal(&self) -> bool {
        self.signal.load(std::sync::atomic::Ordering::Relaxed) && self.signal.swap(false, SeqCst)
    }

    /// Whether anything was signalled that nobody took yet.
    pub(super) fn is_signalled(&self) -> bool {
        self.signal.load(SeqCst)
    }

    /// Gives every woken slot to `each`, in slot order. Executor thread only, after `take_signal`.
    pub(super) fn drain(&self, mut each: impl FnMut(u32)) {
        for segment in bits(self.top.swap(0, SeqCst)) {
            let Some(entry) = self.segments[segment].get() else { continue };
            for word in bits(entry.summary.swap(0, SeqCst)) {
                for bit in bits(entry.words[word].swap(0, SeqCst)) {
                    each((segment * SLOTS_PER_SEGMENT + word * 64 + bit) as u32);
                }
            }
        }
    }

    /// Announces that the executor is about to sleep. False: something came in, do not sleep.
    pub(super) fn prepare_sleep(&self) -> bool {
        self.sleeping.store(true, SeqCst);
        if self.signal.load(SeqCst) {
            self.sleeping.store(false, SeqCst);
            return false;
        }
        true
    }

    /// The executor is awake again and needs no kick.
    pub(super) fn end_sleep(&self) {
        self.sleeping.store(false, SeqCst);
    }
}

fn split(slot: u32) -> (usize, usize, usize) {
    let slot = slot as usize;
    (slot / SLOTS_PER_SEGMENT, slot / 64 % 64, slot % 64)
}

fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let bit = word.trailing_zeros() as usize;
        word &= word - 1;
        Some(bit)
    })
}

/// Wakes whatever task occupies `slot`.
struct TaskWaker {
    remote: Arc<Remote>,
    slot: u32,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !executor::wake_local(self.remote.id, self.slot) {
            self.remote.wake(self.slot);
        }
    }
}

/// The waker of a slot; made once per slot.
pub(super) fn waker(remote: &Arc<Remote>, slot: u32) -> Waker {
    let (segment, _, _) = split(slot);
    assert!(segment < SEGMENTS, "more than {MAX_TASKS} tasks on one executor");
    remote.segments[segment].get_or_init(|| {
        Box::new(Segment { summary: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; 64] })
    });
    Waker::from(Arc::new(TaskWaker { remote: Arc::clone(remote), slot }))
}
