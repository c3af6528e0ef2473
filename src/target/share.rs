//! How queues share the memory for data in flight.
//!
//! What counts is the memory that a queue's commands hold: data that is to be written, data that is being read, and data
//! that the host has not taken yet. A queue may have one command of each direction, or a little, in any case; how far it
//! may go beyond that depends on what all queues hold together, so that whoever joins, or wakes, finds memory at once,
//! however much the others took while they were alone:
//!
//! ```text
//!   held by all:  0 ─────────────────────────── 3/4 ─────────────── 7/8 ─────────────── budget
//!   a queue takes │ up to its window, both ways  │ its first command │ as one of its host's queues, its first command
//! ```
//!
//! A window is the queue's part of three quarters of the budget. Sums are moved without order: they may be a few commands
//! behind, which the last part has room for.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::memory;

/// The most bytes of one window; more in flight gains nothing.
const WINDOW_MAX: usize = 16 << 20;
/// What a queue may hold in one direction as if it were one command, bytes.
const LITTLE: usize = 128 << 10;

/// All I/O queues of a target.
#[derive(Default)]
pub struct Shares {
    queues: AtomicUsize,
    /// Bytes that all of them hold.
    held: AtomicUsize,
}

/// What one host has of the last part of the memory: the right of one of its queues to a command.
#[derive(Debug, Clone, Default)]
pub struct Reserve {
    taken: Arc<AtomicBool>,
}

/// One queue's share, for as long as the queue lives.
pub struct Share {
    all: Arc<Shares>,
    reserve: Reserve,
    /// The reserve of the host is this queue's.
    has_reserve: bool,
    /// What the queue has in the sum of all.
    counted: usize,
}

/// Whether a queue may take memory for one more command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Granted,
    /// Not before commands of this queue have ended.
    WindowFull,
    /// Not before others hold less. Nobody says when they do.
    AllTaken,
}

impl Shares {
    /// Bytes that all queues hold, as of their last turns.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }
}

impl Share {
    pub fn of(all: &Arc<Shares>, reserve: Reserve) -> Share {
        all.queues.fetch_add(1, Ordering::Relaxed);
        Share { all: Arc::clone(all), reserve, has_reserve: false, counted: 0 }
    }

    /// Asks for `more` bytes of a direction in which the queue holds `own` bytes, of `held` in both. What is granted is
    /// counted at once, so that others see it.
    pub fn admit(&mut self, own: usize, held: usize, more: usize) -> Admission {
        let budget = memory::budget();
        let after = self.all.held.load(Ordering::Relaxed).saturating_sub(self.counted) + held + more;
        let is_little = own == 0 || own + more <= LITTLE;
        if !is_little && own + more > self.window(budget) {
            return Admission::WindowFull;
        }
        let admitted = match after {
            after if after <= budget / 4 * 3 => true,
            after if after <= budget / 8 * 7 => is_little,
            _ => own == 0 && self.take_reserve(),
        };
        if !admitted {
            return Admission::AllTaken;
        }
        self.count(held + more);
        Admission::Granted
    }

    /// Takes note that the queue holds `held` bytes now.
    pub fn count(&mut self, held: usize) {
        if held > self.counted {
            self.all.held.fetch_add(held - self.counted, Ordering::Relaxed);
        } else if held < self.counted {
            self.all.held.fetch_sub(self.counted - held, Ordering::Relaxed);
        }
        self.counted = held;
        if held == 0 {
            self.leave_reserve();
        }
    }

    /// Bytes that one direction may hold beyond what it may in any case.
    fn window(&self, budget: usize) -> usize {
        window(budget, self.all.queues.load(Ordering::Relaxed))
    }

    fn take_reserve(&mut self) -> bool {
        self.has_reserve = self.has_reserve || !self.reserve.taken.swap(true, Ordering::Relaxed);
        self.has_reserve
    }

    fn leave_reserve(&mut self) {
        if std::mem::take(&mut self.has_reserve) {
            self.reserve.taken.store(false, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.count(0);
        self.all.queues.fetch_sub(1, Ordering::Relaxed);
    }
}

fn window(budget: usize, queues: usize) -> usize {
    (budget / 8 * 3 / queues.max(1)).min(WINDOW_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Takes commands of 1 MiB until one is refused.
    fn fill(share: &mut Share) -> (usize, Admission) {
        let mut held = 0;
        loop {
            match share.admit(held, held, MIB) {
                Admission::Granted => held += MIB,
                refused => return (held, refused),
            }
        }
    }

    #[test]
    fn all_windows_together_leave_a_quarter_of_the_budget() {
        for budget in [64 << 20, 512 << 20, 8 << 30_usize] {
            for queues in [1, 2, 32, 1000] {
                assert!(2 * queues * window(budget, queues) <= budget / 4 * 3, "{queues} of {budget}");
            }
        }
        assert_eq!(window(512 << 20, 1), WINDOW_MAX);
    }

    #[test]
    fn queues_that_fill_their_windows_one_after_the_other_leave_room_for_another_host() {
        let (all, reserve) = (Arc::default(), Reserve::default());
        let mut greedy = Vec::new();
        for _ in 0..1000 {
            let mut share = Share::of(&all, reserve.clone());
            fill(&mut share);
            greedy.push(share);
        }
        let budget = memory::budget();
        let held = all.held.load(Ordering::Relaxed);
        assert!(held > budget / 4 * 3 && held <= budget / 8 * 7 + MIB, "{held} of {budget}");
        let mut other = Share::of(&all, Reserve::default());
        assert_eq!(other.admit(0, 0, MIB), Admission::Granted);
        assert_eq!(other.admit(MIB, MIB, MIB), Admission::WindowFull);
        // Of the greedy host one queue has a command of the last part, and no other until that has ended.
        let holders = greedy.iter().filter(|share| share.has_reserve).count();
        assert_eq!(holders, 1);
        drop(greedy);
        assert_eq!(all.held.load(Ordering::Relaxed), MIB);
        assert_eq!(fill(&mut other).0, WINDOW_MAX);
        drop(other);
        assert_eq!((all.held.load(Ordering::Relaxed), all.queues.load(Ordering::Relaxed)), (0, 0));
        assert!(!reserve.taken.load(Ordering::Relaxed));
    }

    #[test]
    fn a_queue_may_hold_a_little_whatever_the_others_hold() {
        let all = Arc::default();
        let mut greedy: Vec<Share> = (0..20).map(|_| Share::of(&all, Reserve::default())).collect();
        let windows: Vec<_> = greedy.iter_mut().map(fill).collect();
        // The last ones found little; nobody found nothing.
        assert!(windows.iter().all(|(held, _)| *held >= MIB));
        let mut late = Share::of(&all, Reserve::default());
        for held in (0..LITTLE).step_by(4096) {
            assert_eq!(late.admit(held, held, 4096), Admission::Granted, "{held}");
        }
        drop(greedy);
        late.count(0);
        assert_eq!(all.held.load(Ordering::Relaxed), 0);
    }
}
