//! What a verifying run expects to read.
#![forbid(unsafe_code)]

use super::pattern::Pattern;
use super::{BenchError, BenchSpec, Mismatch};

/// Versions are kept in memory, four bytes for each unit.
const VERIFY_UNITS_MAX: u64 = 1 << 28;

/// Expected contents, by unit.
pub(super) struct Ledger {
    pattern: Pattern,
    /// The version that was written last; 0 is never.
    versions: Vec<u32>,
    /// Units with an operation in flight: what a read beside a write returns is not defined.
    busy: Vec<bool>,
    /// Nothing is written in this run: what an earlier one wrote is what must be there.
    expects_earlier_run: bool,
    pub verified_bytes: u64,
    pub mismatches: u64,
    pub first_mismatch: Option<Mismatch>,
}

impl Ledger {
    pub fn new(spec: &BenchSpec, units: u64) -> Result<Ledger, BenchError> {
        if units > VERIFY_UNITS_MAX {
            let what = format!(
                "verifying {units} operations' worth of blocks takes too much memory; limit the range"
            );
            return Err(BenchError::Spec { what });
        }
        Ok(Ledger {
            pattern: Pattern { seed: spec.seed },
            versions: vec![0; units as usize],
            busy: vec![false; units as usize],
            expects_earlier_run: spec.workload.read_percent == 100,
            verified_bytes: 0,
            mismatches: 0,
            first_mismatch: None,
        })
    }

    /// An operation on `unit` begins; the version that it writes or must find.
    pub fn begin(&mut self, unit: u64, is_write: bool) -> u32 {
        let unit = unit as usize;
        self.busy[unit] = true;
        if is_write {
            // 0 means never written, also after four billion writes.
            self.versions[unit] = self.versions[unit].checked_add(1).unwrap_or(1);
        }
        self.versions[unit]
    }

    /// Compares what a read returned. Blocks that this run has not written may hold anything, unless the whole run only
    /// reads: then they must hold what an earlier run with this seed has written, or zeros.
    pub fn check(&mut self, version: u32, slba: u64, block: usize, buf: &[u8]) {
        if version == 0 && !self.expects_earlier_run {
            return;
        }
        for (n, bytes) in buf.chunks_exact(block).enumerate() {
            let slba = slba + n as u64;
            let outcome = match version {
                0 => self.pattern.check_any(slba, bytes).map(drop),
                version => self.pattern.check(slba, version.into(), bytes),
            };
            if let Err(mismatch) = outcome {
                self.mismatches += 1;
                self.first_mismatch.get_or_insert(mismatch);
            }
        }
        self.verified_bytes += buf.len() as u64;
    }

    /// Whether an operation on the unit is in flight.
    pub fn is_busy(&self, unit: u64) -> bool {
        self.busy[unit as usize]
    }

    /// The operation on `unit` has ended.
    pub fn end(&mut self, unit: u64) {
        self.busy[unit as usize] = false;
    }

    /// The content of a block that is about to be written.
    pub fn fill(&self, block: u64, version: u32, buf: &mut [u8]) {
        self.pattern.fill(block, version.into(), buf);
    }

    /// The units that this run has written.
    pub fn written(&self) -> Vec<u64> {
        (0u64..).zip(&self.versions).filter(|&(_, &version)| version != 0).map(|(unit, _)| unit).collect()
    }
}
