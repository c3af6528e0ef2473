//! What a measurement found.
#![forbid(unsafe_code)]

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::Mismatch;

/// The longest latency that is told apart: a minute, in nanoseconds.
const LATENCY_MAX_NS: u64 = 60_000_000_000;
/// Three significant digits: 0.1 % of error, 200 KiB of memory.
const DIGITS: u8 = 3;

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Latency {
    pub min_us: f64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p95_us: f64,
    pub p99_us: f64,
    pub p99_9_us: f64,
    pub p99_99_us: f64,
    pub max_us: f64,
}

/// The reads or the writes of a measurement, or both together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct OperationReport {
    pub operations: u64,
    pub bytes: u64,
    pub iops: f64,
    pub mib_per_s: f64,
    pub latency: Latency,
}

/// The result of one measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchReport {
    /// Seconds that were measured.
    pub seconds: f64,
    /// Reads and writes together.
    pub total: OperationReport,
    pub reads: OperationReport,
    pub writes: OperationReport,
    /// Bytes whose content was checked (verify mode).
    pub verified_bytes: u64,
    /// Blocks whose content was wrong.
    pub mismatches: u64,
    pub first_mismatch: Option<Mismatch>,
    /// I/O queues and their depth in operations as they were granted: a controller may allow less than asked for.
    pub queues: usize,
    pub queue_depth: u16,
}

/// Counts one kind of operation.
pub(super) struct Tally {
    latency_ns: Histogram<u64>,
    bytes: u64,
}

impl Tally {
    pub fn new() -> Tally {
        let latency_ns =
            Histogram::new_with_bounds(1, LATENCY_MAX_NS, DIGITS).expect("the bounds are constants that fit");
        Tally { latency_ns, bytes: 0 }
    }

    pub fn record(&mut self, latency: Duration, bytes: usize) {
        self.latency_ns.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(1));
        self.bytes += bytes as u64;
    }

    pub fn operations(&self) -> u64 {
        self.latency_ns.len()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn clear(&mut self) {
        self.latency_ns.reset();
        self.bytes = 0;
    }

    /// Both kinds together.
    pub fn merged(&self, other: &Tally) -> Tally {
        let mut latency_ns = self.latency_ns.clone();
        latency_ns.add(&other.latency_ns).expect("both have the same bounds");
        Tally { latency_ns, bytes: self.bytes + other.bytes }
    }

    pub fn report(&self, seconds: f64) -> OperationReport {
        let histogram = &self.latency_ns;
        if histogram.is_empty() || seconds <= 0.0 {
            return OperationReport::default();
        }
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        OperationReport {
            operations: histogram.len(),
            bytes: self.bytes,
            iops: histogram.len() as f64 / seconds,
            mib_per_s: self.bytes as f64 / seconds / f64::from(1 << 20),
            latency: Latency {
                min_us: histogram.min() as f64 / 1000.0,
                mean_us: histogram.mean() / 1000.0,
                p50_us: at(0.50),
                p90_us: at(0.90),
                p95_us: at(0.95),
                p99_us: at(0.99),
                p99_9_us: at(0.999),
                p99_99_us: at(0.9999),
                max_us: histogram.max() as f64 / 1000.0,
            },
        }
    }
}
