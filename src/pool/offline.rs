//! Checking the devices of a pool that is not open.
//!
//! Without repair nothing is written: journals are replayed in memory only, and what is checked is what the next import
//! would find. With repair, damaged copies are written again as they are met; bitmaps and counts are made what the trees
//! say by a commit like any other. What cannot be derived is left as it is.
#![forbid(unsafe_code)]

use std::rc::Rc;
use std::sync::Arc;

use uuid::Uuid;

use super::cache::Object;
use super::catalog::Catalog;
use super::check::{CheckOptions, ShardReport};
use super::entries::check_entries;
use super::error::PoolError;
use super::finding::{CheckReport, Finding, Findings, Kind, Names, Severity, Tally};
use super::fixed::{catalog_lost, check_labels};
use super::label::{Geometry, Label};
use super::lifecycle::{read_label, unchanged_since};
use super::node::{Lineage, NodeId};
use super::picture::Picture;
use super::pointer::BLOCK_BYTES;
use super::prove::Proof;
use super::records::Records;
use super::recover::{Known, Place};
use super::root::RootRecord;
use super::shard::{Shard, flush_all};
use super::tree::VolumeId;
use crate::device::Device;

/// Pages of a shard that are kept in memory.
const PAGES_KEPT: usize = 16384;

/// Checks the pool on these devices, given in any order, none of which may be in use.
pub async fn check_devices(devices: Vec<Device>, options: CheckOptions) -> Result<CheckReport, PoolError> {
    let (label, devices) = arrange(devices).await?;
    let mut findings = check_labels(&devices, &label, options.repair).await;
    let mut tally = Tally::default();
    let report =
        |name: &str, findings, tally| Ok(CheckReport::new(name, Some(label.pool), false, findings, tally));
    let mut catalog = match Catalog::read(label.pool, &devices, label.geometry).await {
        Ok(catalog) => catalog,
        Err(error) => {
            findings.push(catalog_lost(&error));
            return report(&label.name, findings, tally);
        }
    };
    let mut copies = catalog.findings();
    findings.extend(check_entries(&catalog, label.geometry, devices.len()));
    match Records::read(&catalog, label.geometry, devices.len()) {
        Ok(records) => {
            let name = records.pool.name.clone();
            for shard in 0..label.geometry.shards {
                let found = check_shard(&label, &devices, &records, shard, options).await?;
                findings.extend(found.findings);
                tally.add(found.tally);
            }
            if options.repair && catalog.heal().await.unwrap_or(false) {
                copies.list.iter_mut().for_each(|finding| finding.repaired = true);
            }
            findings.extend(copies);
            if options.repair {
                flush_all(&devices).await?;
            }
            report(&name, findings, tally)
        }
        Err(error) => {
            let finding = Finding::new(Severity::Lost, Kind::Record, error.to_string());
            findings.push(finding.costs("the pool cannot be opened while this entry is as it is"));
            findings.extend(copies);
            report(&label.name, findings, tally)
        }
    }
}

/// The pool's label and its devices in vdev order. A device whose labels are both gone is known by its root slots, if it
/// is the only one that is missing.
async fn arrange(devices: Vec<Device>) -> Result<(Label, Vec<Device>), PoolError> {
    let mut found: Vec<(Uuid, Device)> = Vec::new();
    let mut blank = Vec::new();
    let mut label: Option<Label> = None;
    for device in devices {
        let own = read_label(&device).await.ok().and_then(|(_, label)| label);
        let Some(own) = own else {
            blank.push(device);
            continue;
        };
        unchanged_since(&own, &device)?;
        if let Some(label) = &label
            && label.pool != own.pool
        {
            return Err(PoolError::invalid(format!(
                "{} belongs to pool '{}', the others to '{}'",
                device.info().uri,
                own.name,
                label.name
            )));
        }
        if found.iter().any(|(uuid, _)| *uuid == own.device) {
            return Err(PoolError::invalid(format!(
                "{} is a copy of another device given: give only one of them",
                device.info().uri
            )));
        }
        found.push((own.device, device));
        label.get_or_insert(own);
    }
    let Some(label) = label else {
        let uris: Vec<&str> = blank.iter().map(|device| device.info().uri.as_str()).collect();
        return Err(PoolError::not_found(format!("no label of a pool is whole on {}", uris.join(", "))));
    };
    let missing: Vec<(usize, Uuid)> = label
        .devices
        .iter()
        .enumerate()
        .filter(|(_, uuid)| !found.iter().any(|(own, _)| own == *uuid))
        .map(|(vdev, uuid)| (vdev, *uuid))
        .collect();
    if let ([(vdev, uuid)], Some(device)) = (missing.as_slice(), blank.pop())
        && blank.is_empty()
        && holds_roots(&device, &label, *vdev).await
    {
        found.push((*uuid, device));
    } else if let Some((_, uuid)) = missing.first() {
        return Err(PoolError::not_found(format!(
            "pool '{}' has {} devices; the one with UUID {uuid} is not among those given",
            label.name,
            label.devices.len()
        )));
    }
    let in_order = label.devices.iter().filter_map(|uuid| found.iter().find(|(own, _)| own == uuid));
    let in_order = in_order.map(|(_, device)| device.clone()).collect();
    Ok((label, in_order))
}

/// Whether a device without a label has root slots of this pool where those of `vdev` would be.
async fn holds_roots(device: &Device, label: &Label, vdev: usize) -> bool {
    let Geometry { shards, device_blocks, .. } = label.geometry;
    if device.info().size / (BLOCK_BYTES as u64) < device_blocks {
        return false;
    }
    for shard in 0..shards {
        for copy in 0..2u64 {
            if (u64::from(shard) + copy) % label.devices.len() as u64 != vdev as u64 {
                continue;
            }
            for slot in 0..2 {
                let block = label.geometry.root_slot(copy, shard, slot);
                let bytes = super::copy::read(device, block * BLOCK_BYTES as u64, BLOCK_BYTES).await;
                if RootRecord::decode(label.pool, shard, &bytes).is_some() {
                    return true;
                }
            }
        }
    }
    false
}

fn known_of(records: &Records, shard: u16) -> Known {
    let nodes: Vec<(NodeId, Lineage)> = records.nodes().map(|(id, node)| (id, node.lineage())).collect();
    let head =
        |(id, volume): (VolumeId, &super::records::VolumeRecord)| (id, NodeId(volume.head), Arc::default());
    Known { regions: records.regions.of(shard), nodes, volumes: records.volumes().map(head).collect() }
}

async fn check_shard(
    label: &Label,
    devices: &[Device],
    records: &Records,
    index: u16,
    options: CheckOptions,
) -> Result<ShardReport, PoolError> {
    let place = Place {
        pool: label.pool,
        shard: index,
        devices: Rc::from(devices),
        geometry: label.geometry,
        page_limit: PAGES_KEPT,
    };
    let (names, known) = (Names::of(records, label.geometry.shards), known_of(records, index));
    let mut report = ShardReport::default();
    let blank = Shard::blank(&place);
    let (root, findings) = blank.check_roots(options.repair).await;
    report.findings.extend(findings);
    let Some(root) = root else { return Ok(report) };
    let mut journal = blank.check_journal(root.journal).await;
    let gone = |_| PoolError::from(crate::device::IoError::Gone);
    let (mut committed, mut picture) =
        Proof::photograph(&blank, &names, root, &known, options.repair, false).await.map_err(gone)?;
    let bitmaps_known = picture.regions.values().all(|region| region.known);
    let mut why = None;
    let mut replayed = None;
    if committed.nodes_known && bitmaps_known {
        match replay(&place, &known, &root, None).await {
            Ok(shard) => replayed = Some(shard),
            Err(error) => why = Some(error),
        }
    }
    if replayed.is_none() {
        // The bitmaps are lost or contradict the trees: the trees of the commit tell what is in use.
        committed.walk(&mut picture).await.map_err(gone)?;
        if committed.complete {
            picture
                .regions
                .iter_mut()
                .for_each(|(id, region)| region.used = committed.named().of(*id).to_vec());
            match replay(&place, &known, &root, Some(&picture)).await {
                Ok(shard) => replayed = Some(shard),
                Err(error) => why = Some(error),
            }
        }
        let stays = replayed.is_none();
        for finding in &mut committed.findings.list {
            finding.repairable &=
                !(stays && matches!(finding.kind, Kind::Bitmap | Kind::Leak | Kind::Free | Kind::Count));
        }
        report.findings.extend(std::mem::take(&mut committed.findings));
    }
    report.tally.add(committed.tally);
    match replayed {
        Some(shard) => prove_replayed(&shard, &names, &mut report, &mut journal, options).await?,
        None => {
            let why = why.map_or_else(|| "its trees could not be read".to_owned(), |error| error.to_string());
            let what = format!("the journal of shard {index} cannot be replayed: {why}");
            let finding = Finding::new(Severity::Lost, Kind::Journal, what).of_shard(index);
            report.findings.push(finding.costs("what was written since the last commit, in any volume"));
        }
    }
    report.findings.extend(journal);
    Ok(report)
}

/// The shard as the next import would have it, in memory. With a picture, its bitmaps are used, not the stored ones.
async fn replay(
    place: &Place,
    known: &Known,
    root: &RootRecord,
    bitmaps: Option<&Picture>,
) -> Result<Shard, super::recover::RecoverError> {
    let shard = match bitmaps {
        None => Shard::at_root(place, known, root),
        Some(_) => {
            Shard::at_root(place, known, &RootRecord { space: super::pointer::Pointer::EMPTY, ..*root })
        }
    };
    shard.heals.set(false);
    shard.peek_stage();
    shard.load_records(Object::Nodes).await?;
    match bitmaps {
        None => shard.load_records(Object::Space).await?,
        Some(picture) => {
            let mut state = shard.state.borrow_mut();
            for (id, region) in &picture.regions {
                state.space.set_used(*id, &region.used);
            }
            state.space.touch_all();
        }
    }
    shard.replay(root.journal).await?;
    Ok(shard)
}

/// Proves what was replayed, and makes it whole and durable on demand.
async fn prove_replayed(
    shard: &Shard,
    names: &Names,
    report: &mut ShardReport,
    journal: &mut Findings,
    options: CheckOptions,
) -> Result<(), PoolError> {
    let gone = |_| PoolError::from(crate::device::IoError::Gone);
    let rebuilt = !report.findings.is_empty();
    let mut picture = Picture::of(&mut shard.state.borrow_mut());
    let mut proof = Proof::new(shard, names, &picture, options.repair, options.data);
    proof.records(&mut picture, false).await.map_err(gone)?;
    proof.walk(&mut picture).await.map_err(gone)?;
    let (findings, mends) = (std::mem::take(&mut proof.findings), std::mem::take(&mut proof.mends));
    report.tally.add(proof.tally);
    drop(proof);
    for finding in findings.list {
        let same = |known: &Finding| (&known.what, &known.place) == (&finding.what, &finding.place);
        // The tree of bitmaps that was given up is not named any more; what else leaks was found before.
        if !(rebuilt && (finding.kind == Kind::Leak || report.findings.list.iter().any(same))) {
            report.findings.push(finding);
        }
    }
    report.findings.more += findings.more;
    let derivable = |finding: &Finding| finding.repairable && !finding.repaired;
    let unmended = report.findings.list.iter().chain(&journal.list).any(derivable);
    if options.repair && unmended {
        match shard.mend(&mends).await {
            Ok(()) => {
                for finding in report.findings.list.iter_mut().chain(&mut journal.list) {
                    // Copies that could not be written stay as they are, unless a commit has replaced them.
                    let stays = matches!(finding.kind, Kind::Metadata | Kind::Root);
                    finding.repaired |= finding.repairable && !stays;
                }
            }
            Err(error) => {
                let what = format!("shard {} could not be repaired: {error}", shard.index);
                let finding = Finding::new(Severity::Notice, Kind::Unfinished, what);
                report.findings.push(finding.of_shard(shard.index));
            }
        }
    }
    Ok(())
}
