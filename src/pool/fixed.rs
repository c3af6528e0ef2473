//! Checking what lies at fixed places: labels, root slots, journals, and the catalog's two copies.
//!
//! A crash may leave the newest of each in one copy alone: the other was still on its way. That is told apart from
//! damage where it can be, as a [`Severity::Note`]: the next import puts it right.
#![forbid(unsafe_code)]

use super::catalog::{Catalog, CatalogError};
use super::finding::{Finding, Findings, Kind, Severity};
use super::journal::{JournalBlock, decode_block};
use super::label::{Label, LabelError};
use super::pointer::BLOCK_BYTES;
use super::root::RootRecord;
use super::shard::Shard;
use crate::device::Device;
use crate::memory::DmaBuf;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// One copy of a root slot.
pub struct RootCopy {
    /// Slot 0 or 1.
    pub slot: u64,
    /// Copy 0 or 1.
    pub copy: usize,
    /// Byte offset on the device.
    pub offset: u64,
    /// What it says, if it is whole.
    pub root: Option<RootRecord>,
}

impl Shard {
    /// All four root slots.
    pub async fn root_copies(&self) -> Vec<RootCopy> {
        let mut copies = Vec::with_capacity(4);
        for slot in 0..2 {
            for (copy, device) in self.copies().into_iter().enumerate() {
                let offset = self.geometry.root_slot(copy as u64, self.index, slot) * BLOCK;
                let bytes = super::copy::read(device, offset, BLOCK_BYTES).await;
                let root = RootRecord::decode(self.pool, self.index, &bytes);
                copies.push(RootCopy { slot, copy, offset, root });
            }
        }
        copies
    }

    /// The newest root, and which copies differ from what they should be. With `heal`, they are written again.
    pub async fn check_roots(&self, heal: bool) -> (Option<RootRecord>, Findings) {
        let copies = self.root_copies().await;
        let mut findings = Findings::default();
        let newest = copies.iter().filter_map(|copy| copy.root).max_by_key(|root| root.generation);
        let Some(newest) = newest else {
            let what = format!("no root slot of shard {} is whole in any copy", self.index);
            let cost =
                format!("everything that shard {} holds: a part of every volume and snapshot", self.index);
            findings.push(Finding::new(Severity::Lost, Kind::Root, what).costs(cost).of_shard(self.index));
            return (None, findings);
        };
        for copy in &copies {
            let twin = copies.iter().find(|other| other.slot == copy.slot && other.copy != copy.copy);
            let twin = twin.and_then(|twin| twin.root);
            // The slot before the newest: its copies need only agree.
            let expected = match copy.slot == newest.generation % 2 {
                true => Some(newest),
                false => twin.filter(|twin| copy.root.is_none_or(|root| root.generation < twin.generation)),
            };
            let Some(expected) = expected.filter(|expected| copy.root != Some(*expected)) else { continue };
            let device = self.copies()[copy.copy];
            let (shard, number) = (self.index, copy.copy);
            // A commit may have been cut off in the newest but one; nothing depends on that any more.
            let passed = copy.slot != newest.generation % 2;
            let mut finding = match copy.root.is_some() || passed {
                true => {
                    let what = format!(
                        "copy {number} of a root of shard {shard} is torn or out of date, as after a crash"
                    );
                    Finding::new(Severity::Note, Kind::Root, what).repairable()
                }
                false => {
                    Finding::copy(Kind::Root, format!("copy {number} of a root of shard {shard} is damaged"))
                }
            };
            finding = finding.at(&device.info().uri, copy.offset, BLOCK).of_shard(shard);
            if heal {
                finding.repaired = write_again(device, copy.offset, &expected.encode(self.pool, shard)).await;
            }
            findings.push(finding);
        }
        (Some(newest), findings)
    }

    /// The journal's blocks from `from` on that are not whole in both copies, of a shard at rest.
    pub async fn check_journal(&self, from: u64) -> Findings {
        let rings = self.rings().await;
        let size = rings[0].len() as u64;
        let mut findings = Findings::default();
        let at = |copy: usize, sequence: u64| {
            rings[copy][(sequence % size) as usize].as_ref().filter(|block| block.sequence == sequence)
        };
        let found = |sequence: u64| at(0, sequence).or_else(|| at(1, sequence));
        let end = (from..from + size).find(|sequence| found(*sequence).is_none()).unwrap_or(from + size);
        let durable = found(end.wrapping_sub(1)).filter(|_| end > from).map_or(from, |last| last.durable);
        for sequence in from..end {
            for copy in (0..2).filter(|copy| at(*copy, sequence).is_none()) {
                findings.push(self.journal_copy(copy, sequence, sequence < durable));
            }
        }
        let later = (end + 1..from + size).filter_map(found).find(|later| later.durable > end);
        if later.is_some() {
            let what = format!(
                "journal block {end} of shard {} is damaged in both copies while later blocks are there",
                self.index
            );
            let device = self.copies()[0];
            let offset = (self.geometry.journal(0, self.index) + end % size) * BLOCK;
            let finding = Finding::new(Severity::Lost, Kind::Journal, what)
                .costs("writes that were acknowledged after the last commit, in any volume")
                .at(&device.info().uri, offset, BLOCK);
            findings.push(finding.of_shard(self.index));
        }
        findings
    }

    /// The same of a shard at work: what was written and is still needed when it has been read.
    pub async fn check_live_journal(&self) -> Findings {
        let before = self.state.borrow().journal.written();
        let rings = self.rings().await;
        let size = rings[0].len() as u64;
        let after = self.state.borrow().journal.written();
        let mut findings = Findings::default();
        for sequence in after.start..before.end.max(after.start) {
            for (copy, ring) in rings.iter().enumerate() {
                let block = ring[(sequence % size) as usize].as_ref();
                if block.is_none_or(|block| block.sequence != sequence) {
                    findings.push(self.journal_copy(copy, sequence, true));
                }
            }
        }
        findings
    }

    fn journal_copy(&self, copy: usize, sequence: u64, flushed: bool) -> Finding {
        let device = self.copies()[copy];
        let ring = u64::from(self.geometry.journal_blocks);
        let offset = (self.geometry.journal(copy as u64, self.index) + sequence % ring) * BLOCK;
        let finding = match flushed {
            true => Finding::copy(
                Kind::Journal,
                format!("journal block {sequence} of shard {} is damaged in copy {copy}", self.index),
            ),
            false => Finding::new(
                Severity::Note,
                Kind::Journal,
                format!(
                    "journal block {sequence} of shard {} is in one copy only, as after a crash, not in copy {copy}",
                    self.index
                ),
            )
            .repairable(),
        };
        finding.at(&device.info().uri, offset, BLOCK).of_shard(self.index)
    }

    async fn rings(&self) -> [Vec<Option<JournalBlock>>; 2] {
        let mut rings = [Vec::new(), Vec::new()];
        let blocks = self.geometry.journal_blocks as usize;
        for ((copy, device), ring) in self.copies().into_iter().enumerate().zip(&mut rings) {
            let start = self.geometry.journal(copy as u64, self.index) * BLOCK;
            let bytes = super::copy::read(device, start, blocks * BLOCK_BYTES).await;
            *ring = bytes
                .chunks_exact(BLOCK_BYTES)
                .map(|block| decode_block(self.pool, self.index, block))
                .collect();
        }
        rings
    }
}

/// Writes a block at a fixed place again. True when it reads back.
async fn write_again(device: &Device, offset: u64, bytes: &[u8]) -> bool {
    device.write(offset, DmaBuf::copy_of(bytes).freeze()).await.is_ok() && {
        let (result, found) = device.read(offset, DmaBuf::uninit(BLOCK_BYTES)).await;
        result.is_ok() && found[..] == *bytes
    }
}

/// Labels that are not what `label` says they must be, on devices in vdev order. With `heal`, they are written again.
pub async fn check_labels(devices: &[Device], label: &Label, heal: bool) -> Findings {
    let mut findings = Findings::default();
    for (vdev, (device, uuid)) in devices.iter().zip(&label.devices).enumerate() {
        let own = Label { device: *uuid, vdev: vdev as u8, ..label.clone() };
        for block in [0, own.geometry.last_block()] {
            let bytes = super::copy::read(device, block * BLOCK, BLOCK_BYTES).await;
            let why = match Label::decode(&bytes) {
                Ok(found) if found == own => continue,
                Ok(_) => "differs from the other labels of the pool".to_owned(),
                Err(LabelError::Missing) => "is gone".to_owned(),
                Err(error) => format!("is damaged: {error}"),
            };
            let place = if block == 0 { "first" } else { "last" };
            let uri = &device.info().uri;
            let what = format!("the label in the {place} block of {uri} {why}");
            let mut finding = Finding::copy(Kind::Label, what).at(uri, block * BLOCK, BLOCK);
            if heal {
                finding.repaired = write_again(device, block * BLOCK, &own.encode()).await;
            }
            findings.push(finding);
        }
    }
    findings
}

/// What a catalog that cannot be read costs.
pub fn catalog_lost(error: &CatalogError) -> Finding {
    Finding::new(Severity::Lost, Kind::Catalog, error.to_string()).costs(match error {
        CatalogError::Damaged { .. } => "everything that was made, renamed or deleted since that transaction",
        _ => "the names of all volumes and snapshots, and so everything in the pool",
    })
}

impl Catalog {
    /// The catalog's damage as findings.
    pub fn findings(&self) -> Findings {
        let mut findings = Findings::default();
        for bad in self.bad_copies() {
            let what = match bad.newest {
                true => format!(
                    "the newest catalog transaction is in one copy only, as after a crash, not in copy {}",
                    bad.copy
                ),
                false => format!("catalog transaction {} is damaged in copy {}", bad.sequence, bad.copy),
            };
            let severity = if bad.newest { Severity::Note } else { Severity::Degraded };
            let finding = Finding::new(severity, Kind::Catalog, what).repairable();
            findings.push(finding.at(&bad.uri, bad.offset, bad.length));
        }
        findings
    }
}
