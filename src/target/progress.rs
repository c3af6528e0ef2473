//! Whether a host keeps up with what it owes: the data it was asked for, or taking what it asked for.
//!
//! Buffers are held for it meanwhile, so it is not enough that something moves: in each period that begins with bytes due,
//! all of them must move, or a fair number. A host that is merely slow passes; one that sends a byte now and then does not.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// How long a period is.
pub const PERIOD: Duration = Duration::from_secs(60);
/// What must move in a period at least, bytes, if that much was due when it began.
const BYTES_MIN: u64 = 1 << 20;

pub struct Progress {
    since: Instant,
    /// How much must have moved, counted from the beginning of the connection, when the period ends.
    goal: u64,
    idle: bool,
}

impl Progress {
    pub fn new(now: Instant) -> Progress {
        Progress { since: now, goal: 0, idle: true }
    }

    /// Looks at `due` bytes, and at the `moved` ones since the connection began. False if the host has fallen behind.
    pub fn keeps_up(&mut self, now: Instant, due: usize, moved: u64) -> bool {
        let over = now >= self.since + PERIOD;
        if over && !self.idle && due > 0 && moved < self.goal {
            return false;
        }
        if over || self.idle || due == 0 {
            *self = Progress { since: now, goal: moved + (due as u64).min(BYTES_MIN), idle: due == 0 };
        }
        true
    }

    /// When to look again, if something is due.
    pub fn deadline(&self) -> Option<Instant> {
        (!self.idle).then(|| self.since + PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_now_and_then_is_not_enough_but_a_slow_link_is() {
        let start = Instant::now();
        let second = |n: u32| start + Duration::from_secs(n.into());
        let run = |bytes_per_second: u64, due: usize| {
            let mut progress = Progress::new(start);
            (0..600).all(|n| {
                let moved = u64::from(n) * bytes_per_second;
                progress.keeps_up(second(n), due.saturating_sub(moved as usize), moved)
            })
        };
        assert!(!run(0, 1) && !run(1, 16 << 20) && !run(10_000, 16 << 20));
        assert!(run(20_000, 16 << 20), "1 MiB a minute");
        assert!(run(20, 1000), "little that was due has come");
        assert!(run(0, 0), "nothing is due");
    }

    #[test]
    fn a_period_begins_when_something_is_due() {
        let start = Instant::now();
        let mut progress = Progress::new(start);
        assert!(progress.keeps_up(start, 0, 0) && progress.deadline().is_none());
        let later = start + PERIOD * 3;
        assert!(progress.keeps_up(later, 5, 0));
        assert_eq!(progress.deadline(), Some(later + PERIOD));
        assert!(progress.keeps_up(later + PERIOD / 2, 5, 0) && !progress.keeps_up(later + PERIOD, 5, 0));
    }
}
