//! Checking an open pool, while it is in use.
//!
//! What is proved is the last commit of each shard, not what is written meanwhile: everything so far is committed, then
//! for a moment no node is made or ended while each shard *pins* its commit. From then on the check reads what that
//! commit names, from the devices alone, and nothing of it is used again until the check has passed; reads and writes go
//! on. When writes come to need the space that is kept like this, the check of that shard gives way and begins anew.
#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;

use super::catalog::Catalog;
use super::entries::check_entries;
use super::error::PoolError;
use super::finding::{CheckReport, Finding, Findings, Kind, Names, Severity, Tally};
use super::fixed::{catalog_lost, check_labels};
use super::home::Home;
use super::lifecycle::read_label;
use super::node::{Lineage, NodeId, Root};
use super::prove::{Broken, Mend, Proof};
use super::recover::Known;
use super::root::RootRecord;
use super::shard::Shard;
use crate::device::IoError;

/// How often the check of a shard begins anew after giving way.
const ATTEMPTS: u32 = 3;

/// What a check does beyond looking.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CheckOptions {
    /// Derive again what can be derived.
    pub repair: bool,
    /// Read every block of data too.
    pub data: bool,
}

/// What was found in one shard.
#[derive(Default)]
pub(super) struct ShardReport {
    pub findings: Findings,
    pub tally: Tally,
}

/// A shard's commit, kept until it is unpinned.
type Pinned = (RootRecord, u64);

impl Home {
    /// What is wrong with the pool, and on demand its repair.
    pub async fn examine(&self, options: CheckOptions) -> Result<CheckReport, PoolError> {
        let _alone = self.checks.acquire(1).await;
        let mut findings = self.check_fixed(options.repair).await?;
        let mut tally = Tally::default();
        let mut waiting: Vec<u16> = (0..self.geometry.shards).collect();
        for attempt in 0..ATTEMPTS {
            let reports = self.check_shards(&waiting, options).await?;
            let mut again = Vec::new();
            for (shard, report) in waiting.iter().zip(reports) {
                match report? {
                    Ok(report) => {
                        findings.extend(report.findings);
                        tally.add(report.tally);
                    }
                    Err(Broken::Gone) => return Err(IoError::Gone.into()),
                    Err(Broken::Pressed) => again.push(*shard),
                }
            }
            waiting = again;
            if waiting.is_empty() {
                break;
            }
            if attempt + 1 < ATTEMPTS {
                crate::reactor::sleep(std::time::Duration::from_millis(200)).await;
            }
        }
        for shard in waiting {
            let what = format!(
                "shard {shard} was not examined: the pool is so full that writes need all of its space"
            );
            findings.push(Finding::new(Severity::Notice, Kind::Unfinished, what).of_shard(shard));
        }
        let records = self.records.borrow();
        Ok(CheckReport::new(&records.pool.name, Some(self.uuid), true, findings, tally))
    }

    /// Labels and the catalog.
    pub(super) async fn check_fixed(&self, heal: bool) -> Result<Findings, PoolError> {
        let mut findings = Findings::default();
        let devices = &self.owners.devices;
        let mut whole = None;
        for device in devices {
            // Of a device with no label at all the others tell.
            let label = read_label(device).await.ok().and_then(|(_, label)| label);
            whole = whole.or(label.filter(|l| l.pool == self.uuid && l.devices == self.devices));
        }
        match whole {
            Some(label) => findings.extend(check_labels(devices, &label, heal).await),
            None => {
                let finding =
                    Finding::new(Severity::Lost, Kind::Label, "no label of the pool is whole on any device");
                findings.push(finding.costs("the whole pool, once it is exported"));
            }
        }
        let _lock = self.catalog_lock.acquire(1).await;
        let mut catalog = self.catalog.borrow_mut().take().ok_or(IoError::Gone)?;
        let seen = Catalog::read(self.uuid, devices, self.geometry).await;
        match seen {
            Ok(seen) => {
                let mut found = seen.findings();
                catalog.note_damage(&seen);
                if heal && catalog.heal().await.unwrap_or(false) {
                    found.list.iter_mut().for_each(|finding| finding.repaired = true);
                }
                findings.extend(found);
            }
            // All of it is in memory still.
            Err(error) => {
                let mut finding = catalog_lost(&error).repairable();
                finding.repaired = heal && catalog.write_anew().await.is_ok();
                findings.push(finding);
            }
        }
        findings.extend(check_entries(&catalog, self.geometry, devices.len()));
        *self.catalog.borrow_mut() = Some(catalog);
        Ok(findings)
    }

    /// The shards, side by side, all of them as they were at one moment.
    #[allow(clippy::type_complexity)]
    async fn check_shards(
        &self,
        shards: &[u16],
        options: CheckOptions,
    ) -> Result<Vec<Result<Result<ShardReport, Broken>, IoError>>, PoolError> {
        for index in shards {
            // What does not fit into a full pool's metadata waits in the journal.
            let _ = self.owners.on(*index, |shard| async move { shard.commit().await }).await?;
        }
        let (pinned, knowns, names) = {
            let _still = self.operations.acquire(1).await;
            let mut pinned: Vec<(u16, Pinned)> = Vec::new();
            let mut failed = None;
            for index in shards {
                match self
                    .owners
                    .on(*index, |shard| async move { shard.pin().await })
                    .await
                    .and_then(|pin| pin)
                {
                    Ok(pin) => pinned.push((*index, pin)),
                    Err(error) => failed = Some(error),
                }
            }
            if let Some(error) = failed {
                for (index, (_, generation)) in pinned {
                    let _ = self.owners.on(index, move |shard| async move { shard.unpin(generation) }).await;
                }
                return Err(error.into());
            }
            let records = self.records.borrow();
            let nodes: Vec<(NodeId, Lineage)> =
                records.nodes().map(|(id, node)| (id, node.lineage())).collect();
            let known = |shard: u16| Known {
                regions: records.regions.of(shard),
                nodes: nodes.clone(),
                volumes: Vec::new(),
            };
            let knowns: Vec<Known> = shards.iter().map(|shard| known(*shard)).collect();
            (pinned, knowns, Arc::new(Names::of(&records, self.geometry.shards)))
        };
        let runs = pinned.into_iter().zip(knowns).map(|((index, (root, generation)), known)| {
            let names = Arc::clone(&names);
            self.owners.on(index, move |shard| async move {
                let report = shard.check_commit(root, &known, &names, options).await;
                // What follows may take hours, and needs no block kept that is not read just then.
                shard.unpin(generation);
                let mut report = report?;
                if options.data {
                    report.tally.add(shard.check_data(&names, &mut report.findings).await?);
                }
                Ok(report)
            })
        });
        Ok(super::join::all(runs).await)
    }
}

impl Shard {
    /// Checks a pinned commit, and what lies at this shard's fixed places.
    async fn check_commit(
        self: &Rc<Self>,
        root: RootRecord,
        known: &Known,
        names: &Names,
        options: CheckOptions,
    ) -> Result<ShardReport, Broken> {
        let mut report = ShardReport::default();
        let (mut proof, mut picture) =
            Proof::photograph(self, names, root, known, options.repair, false).await?;
        let readable = proof.nodes_known && picture.regions.values().all(|region| region.known);
        if readable {
            proof.walk(&mut picture).await?;
        } else {
            // The records are in memory, and can be written again from there.
            proof.mends.push(Mend::Rewrite);
            for finding in &mut proof.findings.list {
                if matches!(finding.kind, Kind::Nodes | Kind::Bitmap) {
                    finding.repairable = true;
                    finding.cost = "nothing while the pool is open: it is in memory".to_owned();
                }
            }
            let what = format!("the trees of shard {} were not walked: repair its records first", self.index);
            proof.findings.push(Finding::new(Severity::Notice, Kind::Unfinished, what).of_shard(self.index));
        }
        drop(picture);
        report.tally.add(proof.tally);
        let (mut findings, mends) = (std::mem::take(&mut proof.findings), std::mem::take(&mut proof.mends));
        drop(proof);
        {
            let _idle = self.commit_lock.acquire(1).await;
            findings.extend(self.check_roots(options.repair).await.1);
        }
        findings.extend(self.check_live_journal().await);
        let unmended = findings.list.iter().any(|finding| finding.repairable && !finding.repaired);
        if options.repair && unmended && self.mend(&mends).await.is_ok() {
            for finding in &mut findings.list {
                finding.repaired |=
                    finding.repairable && !matches!(finding.kind, Kind::Metadata | Kind::Root);
            }
        }
        report.findings = findings;
        Ok(report)
    }

    /// Makes counts and bitmaps what the trees say, and commits.
    pub(super) async fn mend(&self, mends: &[Mend]) -> Result<(), IoError> {
        {
            let mut state = self.state.borrow_mut();
            let state = &mut *state;
            let generation = state.generation;
            for mend in mends {
                match *mend {
                    Mend::Free(block) => {
                        // Whatever it is now, it is no longer what was found.
                        let _ = state.space.free(block, generation);
                    }
                    Mend::Claim(block) => {
                        let _ = state.space.claim(block, 1);
                    }
                    Mend::Count(node, referenced, written) => {
                        if matches!(state.nodes.slot(node).root, Root::Own(_)) {
                            state.nodes.count(node, referenced, written);
                        }
                    }
                    Mend::Rewrite => {
                        state.nodes.touch_all();
                        state.space.touch_all();
                    }
                }
            }
            // Something must change for a commit to be made, which ends the need of the journal so far.
            state.nodes.touch(NodeId(0));
        }
        self.commit().await
    }

    /// The root and journal blocks that recovery would read; of a shard at rest also those of its trees.
    #[cfg(test)]
    pub async fn live_metadata(&self) -> Vec<super::pointer::Block> {
        use super::pointer::Block;
        let mut blocks = std::collections::BTreeSet::new();
        let state = self.state.borrow();
        if !state.is_dirty() {
            for block in state.space.used_blocks() {
                if let Some(twin) = state.space.twin(block) {
                    blocks.extend([block, twin]);
                }
            }
        }
        let (slot, journal) = ((state.generation - 1) % 2, state.journal.live());
        for copy in 0..2u64 {
            let vdev = (u64::from(self.index) + copy) % self.devices.len() as u64;
            blocks.insert(Block::new(vdev as u8, self.geometry.root_slot(copy, self.index, slot)));
            let start = self.geometry.journal(copy, self.index);
            let size = u64::from(self.geometry.journal_blocks);
            blocks.extend(journal.clone().map(|at| Block::new(vdev as u8, start + at % size)));
        }
        blocks.into_iter().collect()
    }
}
