//! What a check says: each thing found wrong, where it lies, what it touches, and what could be done about it.
//!
//! A finding names a place on a device (URI and byte) and, where the pool's own records lead there, also a place that
//! does not depend on any device: volumes and snapshots by name, and the logical blocks within them.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use serde::Serialize;
use uuid::Uuid;

use super::node::NodeId;
use super::pointer::{BLOCK_BYTES, CHUNK_BYTES, FANOUT};
use super::records::Records;
use super::tree::VolumeId;

/// The most findings that one check lists; what is beyond is counted.
pub const FINDINGS_MAX: usize = 1000;
/// The most holders that one finding lists.
pub const HOLDERS_MAX: usize = 16;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// What a crash leaves behind and the next import puts right. A pool with nothing else is clean.
    Note,
    /// Nothing is lost and nothing can be yet: space that nobody uses, a count that is off.
    Notice,
    /// One of two copies is gone. Nothing is lost until the other one goes too.
    Degraded,
    /// The pool contradicts itself: going on may lose data.
    Contradiction,
    /// Something is lost.
    Lost,
}

/// What kind of thing is wrong. The names are part of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A label.
    Label,
    /// A root slot.
    Root,
    /// A journal block.
    Journal,
    /// A transaction of the catalog.
    Catalog,
    /// An entry of the catalog that contradicts others.
    Record,
    /// The table of regions.
    Region,
    /// One copy of a page, a block of node records or a bitmap.
    Metadata,
    /// A page in both copies.
    Page,
    /// A block of node records in both copies.
    Nodes,
    /// A bitmap in both copies.
    Bitmap,
    /// A block in use that nothing names.
    Leak,
    /// A block that is named but free.
    Free,
    /// A block that two owners would each free.
    Shared,
    /// A pointer that cannot be right.
    Pointer,
    /// A count of blocks that is not what a walk finds.
    Count,
    /// A block of data.
    Data,
    /// Not examined to the end.
    Unfinished,
}

/// A place on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Place {
    /// The device's URI.
    pub device: String,
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// A range of a volume or snapshot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Extent {
    /// Its name; of what is being deleted its number.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The first logical block, in the block size that hosts see.
    pub lba: u64,
    /// Logical blocks.
    pub blocks: u64,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of thing.
    pub kind: Kind,
    /// For people.
    pub what: String,
    /// Where on the devices, if it has a place there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// The shard, if it is one's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<u16>,
    /// The volumes and snapshots that it touches, and where in them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extents: Vec<Extent>,
    /// What would be lost by giving it up.
    pub cost: String,
    /// Whether it can be derived from what else is there.
    pub repairable: bool,
    /// Whether it was repaired.
    pub repaired: bool,
}

impl Finding {
    /// Something wrong that costs nothing and has no place yet.
    pub fn new(severity: Severity, kind: Kind, what: impl Into<String>) -> Finding {
        Finding {
            severity,
            kind,
            what: what.into(),
            place: None,
            shard: None,
            extents: Vec::new(),
            cost: "nothing".to_owned(),
            repairable: false,
            repaired: false,
        }
    }

    /// One of two copies is damaged; the other one is whole.
    pub fn copy(kind: Kind, what: impl Into<String>) -> Finding {
        Finding::new(Severity::Degraded, kind, what).repairable()
    }

    /// Adds a place.
    pub fn at(mut self, device: &str, offset: u64, length: u64) -> Finding {
        self.place = Some(Place { device: device.to_owned(), offset, length });
        self
    }

    /// Adds the shard.
    pub fn of_shard(mut self, shard: u16) -> Finding {
        self.shard = Some(shard);
        self
    }

    /// Adds what giving it up would cost.
    pub fn costs(mut self, cost: impl Into<String>) -> Finding {
        self.cost = cost.into();
        self
    }

    /// It can be derived from what else is there.
    pub fn repairable(mut self) -> Finding {
        self.repairable = true;
        self
    }
}

/// Findings, up to a limit.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Those kept.
    pub list: Vec<Finding>,
    /// How many more there were.
    pub more: u64,
}

impl Findings {
    /// Adds one.
    pub fn push(&mut self, finding: Finding) {
        if self.list.len() < FINDINGS_MAX {
            self.list.push(finding);
        } else {
            self.more += 1;
        }
    }

    /// Adds all of another's.
    pub fn extend(&mut self, other: Findings) {
        for finding in other.list {
            self.push(finding);
        }
        self.more += other.more;
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty() && self.more == 0
    }
}

/// What a check found.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// The pool.
    pub pool: String,
    /// Its UUID.
    pub uuid: Option<Uuid>,
    /// Whether the pool was in use meanwhile.
    pub online: bool,
    /// Whether nothing is wrong, or all of it was repaired.
    pub clean: bool,
    /// What is wrong, the worst first.
    pub findings: Vec<Finding>,
    /// Findings beyond those listed.
    pub more: u64,
    /// Findings that were repaired.
    pub repaired: u64,
    /// Metadata blocks read, both copies counted.
    pub metadata_blocks: u64,
    /// Data blocks read.
    pub data_blocks: u64,
    /// Data blocks that the trees name.
    pub named_blocks: u64,
}

impl CheckReport {
    /// From what was found.
    pub(super) fn new(
        pool: &str,
        uuid: Option<Uuid>,
        online: bool,
        findings: Findings,
        tally: Tally,
    ) -> CheckReport {
        let Findings { mut list, more } = findings;
        list.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let repaired = list.iter().filter(|finding| finding.repaired).count() as u64;
        CheckReport {
            pool: pool.to_owned(),
            uuid,
            online,
            clean: more == 0 && list.iter().all(|f| f.repaired || f.severity == Severity::Note),
            findings: list,
            more,
            repaired,
            metadata_blocks: tally.metadata,
            data_blocks: tally.data,
            named_blocks: tally.named,
        }
    }
}

/// What a check has looked at.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Metadata blocks read, both copies counted.
    pub metadata: u64,
    /// Data blocks read.
    pub data: u64,
    /// Data blocks that the trees name.
    pub named: u64,
}

impl Tally {
    /// Adds another's.
    pub fn add(&mut self, other: Tally) {
        self.metadata += other.metadata;
        self.data += other.data;
        self.named += other.named;
    }
}

/// How a node is called, and what a host sees of it.
#[derive(Debug, Clone)]
struct Name {
    name: String,
    uuid: Uuid,
    block_size: u32,
    size: u64,
}

/// The names of all nodes, to be taken to the shards.
#[derive(Debug, Clone, Default)]
pub struct Names {
    nodes: HashMap<NodeId, Name>,
    shards: u64,
}

impl Names {
    /// As the catalog has them.
    pub fn of(records: &Records, shards: u16) -> Names {
        let nodes = records.nodes().map(|(id, node)| {
            let volume = records.volume_of_head(id);
            let (name, uuid) = match (volume, &node.name) {
                (Some(volume), _) => (volume.name.clone(), volume.uuid),
                (None, Some(name)) => (name.clone(), node.uuid),
                (None, None) => {
                    let of = records.volume(VolumeId(node.volume)).map(|volume| volume.name.as_str());
                    (format!("deleted node {} of {}", id.0, of.unwrap_or("a deleted volume")), node.uuid)
                }
            };
            (id, Name { name, uuid, block_size: node.block_size, size: node.size })
        });
        Names { nodes: nodes.collect(), shards: u64::from(shards) }
    }

    /// What people call a node.
    pub fn name(&self, node: NodeId) -> String {
        self.nodes.get(&node).map_or_else(|| format!("node {}", node.0), |name| name.name.clone())
    }

    /// `count` slots of a shard's part of a node from `slot` on, as ranges of the whole volume. What adjoins is one
    /// range; of what would be more than [`HOLDERS_MAX`] ranges, one that covers them all.
    pub fn extents(&self, node: NodeId, shard: u16, slot: u64, count: u64) -> Vec<Extent> {
        let Some(name) = self.nodes.get(&node) else { return Vec::new() };
        let offset_of = |slot: u64| {
            let (leaf, within) = (slot / FANOUT as u64, slot % FANOUT as u64);
            (leaf * self.shards + u64::from(shard)) * CHUNK_BYTES + within * BLOCK_BYTES as u64
        };
        let unit = u64::from(name.block_size.max(512));
        let extent = |offset: u64, end: u64| Extent {
            name: name.name.clone(),
            uuid: name.uuid,
            offset,
            length: end - offset,
            lba: offset / unit,
            blocks: (end - offset) / unit,
        };
        let (mut at, end) = (slot, slot.saturating_add(count));
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        while at < end && offset_of(at) < name.size {
            let slots = (end - at).min(FANOUT as u64 - at % FANOUT as u64);
            let from = offset_of(at);
            let to = (from + slots * BLOCK_BYTES as u64).min(name.size);
            let full = ranges.len() == HOLDERS_MAX;
            match ranges.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                Some(_) if full => {
                    return vec![extent(
                        offset_of(slot),
                        (offset_of(end - 1) + BLOCK_BYTES as u64).min(name.size),
                    )];
                }
                _ => ranges.push((from, to)),
            }
            at += slots;
        }
        ranges.into_iter().map(|(from, to)| extent(from, to)).collect()
    }
}
