//! How queues share the memory for data in flight.
//!
//! Each queue has two windows, for data that comes and for data that goes. All windows together leave a quarter of the
//! budget free, so that a queue which joins, or wakes, finds memory at once, whatever the others hold. A window is always
//! open for one command, so that a queue makes progress however many there are.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::memory;

/// The most bytes of one window; more in flight gains nothing.
const WINDOW_MAX: usize = 16 << 20;

/// All I/O queues of a target.
#[derive(Default)]
pub struct Shares {
    queues: AtomicUsize,
}

/// One queue's share, for as long as the queue lives.
pub struct Share {
    all: Arc<Shares>,
}

impl Share {
    pub fn of(all: &Arc<Shares>) -> Share {
        all.queues.fetch_add(1, Ordering::Relaxed);
        Share { all: Arc::clone(all) }
    }

    /// Bytes that one direction may hold beyond its first command.
    pub fn window(&self) -> usize {
        window(memory::budget(), self.all.queues.load(Ordering::Relaxed))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.all.queues.fetch_sub(1, Ordering::Relaxed);
    }
}

fn window(budget: usize, queues: usize) -> usize {
    (budget / 8 * 3 / queues.max(1)).min(WINDOW_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_queue_counts_while_it_lives() {
        let all = Arc::default();
        let first = Share::of(&all);
        let alone = first.window();
        let others: Vec<Share> = (0..999).map(|_| Share::of(&all)).collect();
        assert!(first.window() < alone);
        drop(others);
        assert_eq!(first.window(), alone);
    }
}
