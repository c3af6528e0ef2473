//! The engine of `rimrock bench`: one pinned thread that keeps some queues of a target full and measures it.
//!
//! The loop is the same for every workload: submit until each queue holds its depth, send all of it in one vectored call,
//! receive as much as there is, account for what completed. The clock is read once per batch. An operation larger than
//! the controller's MDTS is split into commands; its latency is that of its last part.
//!
//! In verify mode every block written carries a pattern made from (seed, block, version), see [`pattern`]; every block read
//! is compared byte by byte, and at the end all that was written is read back once more.
#![forbid(unsafe_code)]

mod engine;
mod ledger;
pub mod pattern;
mod report;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::HostError;
use crate::nvme::Status;
use crate::nvme::tcp::Digests;

pub use pattern::Mismatch;
pub use report::{BenchReport, Latency, OperationReport};

/// What the load consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Of a hundred operations, how many are reads.
    pub read_percent: u8,
    /// Random offsets instead of ascending ones.
    pub is_random: bool,
}

impl Workload {
    pub const READ: Workload = Workload { read_percent: 100, is_random: false };
    pub const WRITE: Workload = Workload { read_percent: 0, is_random: false };
    pub const RAND_READ: Workload = Workload { read_percent: 100, is_random: true };
    pub const RAND_WRITE: Workload = Workload { read_percent: 0, is_random: true };
}

/// `read`, `write`, `randread`, `randwrite`, `rw`, `randrw`; the mixed ones may be followed by the percentage of reads, as
/// in `randrw:70` (50 otherwise).
impl FromStr for Workload {
    type Err = UnknownWorkload;

    fn from_str(text: &str) -> Result<Workload, UnknownWorkload> {
        let unknown = || UnknownWorkload { found: text.into() };
        let (name, percent) = match text.split_once(':') {
            Some((name @ ("rw" | "randrw"), percent)) => (name, percent.parse().map_err(|_| unknown())?),
            Some(_) => return Err(unknown()),
            None => (text, 50),
        };
        let (read_percent, is_random) = match name {
            "read" => (100, false),
            "write" => (0, false),
            "randread" => (100, true),
            "randwrite" => (0, true),
            "rw" => (percent, false),
            "randrw" => (percent, true),
            _ => return Err(unknown()),
        };
        if read_percent > 100 { Err(unknown()) } else { Ok(Workload { read_percent, is_random }) }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_random { "rand" } else { "" })?;
        match self.read_percent {
            100 => f.write_str("read"),
            0 => f.write_str("write"),
            percent => write!(f, "rw:{percent}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown workload {found:?}; one of read, write, randread, randwrite, rw[:READ_PERCENT], randrw[:READ_PERCENT]"
)]
pub struct UnknownWorkload {
    pub found: String,
}

/// One measurement.
#[derive(Debug, Clone)]
pub struct BenchSpec {
    pub addr: SocketAddr,
    pub subnqn: String,
    /// The host's name; made up when `None`.
    pub hostnqn: Option<String>,
    pub nsid: u32,
    pub workload: Workload,
    /// Bytes of one operation, a multiple of the namespace's block size.
    pub block_bytes: usize,
    /// Operations in flight on each queue.
    pub queue_depth: u16,
    /// I/O queues, each its own TCP connection, all driven by one thread.
    pub queues: u16,
    pub duration: Duration,
    /// Runs before the measurement and is not counted.
    pub warmup: Duration,
    /// The core to run on; not pinned when `None`.
    pub core: Option<usize>,
    /// Only the first so many bytes of the namespace are used; all when `None`.
    pub range_bytes: Option<u64>,
    pub digests: Digests,
    /// Check the content of what is read: with writes in the workload against what this run has written, without them
    /// against what an earlier run with the same seed has written (or zeros).
    pub verify: bool,
    /// Of the offsets, the mix and the patterns.
    pub seed: u64,
}

impl BenchSpec {
    /// Random reads of 4 KiB, 32 in flight on one queue, for five seconds.
    pub fn new(addr: SocketAddr, subnqn: &str) -> BenchSpec {
        BenchSpec {
            addr,
            subnqn: subnqn.into(),
            hostnqn: None,
            nsid: 1,
            workload: Workload::RAND_READ,
            block_bytes: 4096,
            queue_depth: 32,
            queues: 1,
            duration: Duration::from_secs(5),
            warmup: Duration::ZERO,
            core: None,
            range_bytes: None,
            digests: Digests(0),
            verify: false,
            seed: 1,
        }
    }
}

/// How a measurement stands, told once a second.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    pub elapsed: Duration,
    /// Operations and bytes since the last report.
    pub operations: u64,
    pub bytes: u64,
    /// Time since the last report.
    pub interval: Duration,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("cannot bind to core {core}: {source}")]
    Core { core: usize, source: nix::errno::Errno },
    #[error("the load thread cannot be started: {0}")]
    Thread(std::io::Error),
    #[error("the load thread has panicked")]
    Panicked,
    #[error("{what}")]
    Spec { what: String },
    #[error("{operation} of block {slba} failed: {status}")]
    Command { operation: &'static str, slba: u64, status: Status },
}

/// Measures; blocks until it is done.
pub fn run(spec: BenchSpec) -> Result<BenchReport, BenchError> {
    run_watched(spec, |_| {})
}

/// Measures and tells `watch` once a second how it stands, on the load thread.
pub fn run_watched(
    spec: BenchSpec,
    watch: impl FnMut(&Progress) + Send + 'static,
) -> Result<BenchReport, BenchError> {
    let thread = std::thread::Builder::new().name("bench".into()).spawn(move || {
        if let Some(core) = spec.core {
            pin(core)?;
        }
        engine::Engine::connect(&spec)?.run(watch)
    });
    thread.map_err(BenchError::Thread)?.join().map_err(|_| BenchError::Panicked)?
}

fn pin(core: usize) -> Result<(), BenchError> {
    let wrong = |source| BenchError::Core { core, source };
    let mut set = CpuSet::new();
    set.set(core).map_err(wrong)?;
    sched_setaffinity(Pid::from_raw(0), &set).map_err(wrong)
}

#[cfg(test)]
mod tests;
