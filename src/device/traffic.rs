//! What went to a device and came from it: counters that cost an I/O a few nanoseconds.
//!
//! Each thread counts in a lane of its own, so that reactors do not fight over a cache line; reading adds the lanes up.
//! An operation counts when it is handed to the device, whatever becomes of it.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Threads beyond these share a lane, which is slower and still right.
const LANES: usize = 16;

thread_local! {
    static LANE: usize = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed) % LANES
    };
}

/// Operations and bytes since a device was opened. Of two readings, [`since`](Traffic::since) is what lies between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub written_bytes: u64,
    pub flushes: u64,
    /// Discards and zeroed ranges.
    pub discards: u64,
    pub discarded_bytes: u64,
}

impl Traffic {
    /// What came after `earlier`.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        Traffic {
            reads: self.reads - earlier.reads,
            read_bytes: self.read_bytes - earlier.read_bytes,
            writes: self.writes - earlier.writes,
            written_bytes: self.written_bytes - earlier.written_bytes,
            flushes: self.flushes - earlier.flushes,
            discards: self.discards - earlier.discards,
            discarded_bytes: self.discarded_bytes - earlier.discarded_bytes,
        }
    }
}

/// One thread's counts, alone on their cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Lane {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    discarded_bytes: AtomicU64,
}

#[derive(Default)]
pub(super) struct Counters {
    lanes: [Lane; LANES],
}

impl Counters {
    fn lane(&self) -> &Lane {
        &self.lanes[LANE.with(|lane| *lane)]
    }

    pub(super) fn read(&self, bytes: u64) {
        let lane = self.lane();
        lane.reads.fetch_add(1, Ordering::Relaxed);
        lane.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn write(&self, bytes: u64) {
        let lane = self.lane();
        lane.writes.fetch_add(1, Ordering::Relaxed);
        lane.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn flush(&self) {
        self.lane().flushes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn discard(&self, bytes: u64) {
        let lane = self.lane();
        lane.discards.fetch_add(1, Ordering::Relaxed);
        lane.discarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn total(&self) -> Traffic {
        let sum =
            |pick: fn(&Lane) -> &AtomicU64| self.lanes.iter().map(|l| pick(l).load(Ordering::Relaxed)).sum();
        Traffic {
            reads: sum(|lane| &lane.reads),
            read_bytes: sum(|lane| &lane.read_bytes),
            writes: sum(|lane| &lane.writes),
            written_bytes: sum(|lane| &lane.written_bytes),
            flushes: sum(|lane| &lane.flushes),
            discards: sum(|lane| &lane.discards),
            discarded_bytes: sum(|lane| &lane.discarded_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_many_threads_add_up() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for _ in 0..3 * LANES {
                scope.spawn(|| {
                    counters.read(1);
                    counters.write(4096);
                    counters.flush();
                    counters.discard(512);
                });
            }
        });
        let before = Traffic { reads: 8, written_bytes: 4096, ..Traffic::default() };
        let threads = 3 * LANES as u64;
        let expected = Traffic {
            reads: threads - 8,
            read_bytes: threads,
            writes: threads,
            written_bytes: 4096 * threads - 4096,
            flushes: threads,
            discards: threads,
            discarded_bytes: 512 * threads,
        };
        assert_eq!(counters.total().since(&before), expected);
    }
}
