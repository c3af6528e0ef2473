//! What the catalog holds, typed: the pool, its volumes, its nodes, who owns which [region](super::regions), and what
//! upper rooms keep in it. Values are JSON so that they can be read in ten years.
//!
//! | key | value |
//! |---|---|
//! | `pool` | [`PoolRecord`] |
//! | `volume/<id>` | [`VolumeRecord`] |
//! | `node/<id>` | [`NodeRecord`] |
//! | `region/<vdev>/<page>` | 256 regions |
//! | `config/…` | whatever upper rooms keep |
//!
//! A change is made in the catalog first and in memory once it is durable, by [`Changes`]: nobody ever sees what a crash
//! could take back.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::catalog::{Catalog, Transaction};
use super::label::Geometry;
use super::node::{Lineage, NodeId};
use super::pointer::{EPOCH_MAX, Epoch};
use super::regions::Regions;
use super::tree::VolumeId;

/// The pool itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PoolRecord {
    /// Its name.
    pub name: String,
    /// Epoch of new blocks.
    pub epoch: Epoch,
    /// The next node's number.
    pub next_node: u32,
    /// The next volume's number.
    pub next_volume: u32,
}

/// Somebody's wish that a volume or snapshot stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Who wishes it.
    pub by: String,
    /// Why, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds since 1970.
    pub created: u64,
}

/// A volume.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The identity that hosts see.
    pub uuid: Uuid,
    /// Its name.
    pub name: String,
    /// The node that takes its writes.
    pub head: u32,
    /// Bytes.
    pub size: u64,
    /// Logical block size for hosts.
    pub block_size: u32,
    /// False: every write is durable when acknowledged.
    pub write_cache: bool,
    /// Seconds since 1970.
    pub created: u64,
    /// Everything from this byte on is still to be given back: the volume was shrunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clear_from: Option<u64>,
    /// The snapshot it began as, by UUID, for a clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Uuid>,
    /// Who wants it to stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<Pin>,
}

/// A node: a head (no name, not sealed) or a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The identity that hosts see when the snapshot is exported.
    pub uuid: Uuid,
    /// The snapshot's name; `None` for a head and for a node being deleted.
    pub name: Option<String>,
    /// The node it grew from.
    pub parent: Option<u32>,
    /// The epoch that ended with it; `None` for a head.
    pub sealed: Option<Epoch>,
    /// Bytes.
    pub size: u64,
    /// Logical block size for hosts.
    pub block_size: u32,
    /// The volume it was the head of.
    pub volume: u32,
    /// Seconds since 1970.
    pub created: u64,
    /// Nobody can use it any more: it waits to be taken apart.
    #[serde(default)]
    pub deleting: bool,
    /// Deleted, and kept for what several others that grew from it share; what it inherited no longer counts.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ghost: bool,
    /// A ghost that holds nothing but what is shared; no longer so when one of those goes that grew from it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub thinned: bool,
    /// Who wants it to stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<Pin>,
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl NodeRecord {
    /// What shards must know.
    pub fn lineage(&self) -> Lineage {
        Lineage { parent: self.parent.map(NodeId), sealed: self.sealed, ghost: self.ghost }
    }
}

/// A name leads to one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entity {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(NodeId),
}

/// All of it, in memory, as the catalog has it.
pub struct Records {
    /// The pool. Its numbers only grow, and may be ahead of the catalog's.
    pub pool: PoolRecord,
    /// Regions.
    pub regions: Regions,
    volumes: BTreeMap<VolumeId, VolumeRecord>,
    nodes: BTreeMap<NodeId, NodeRecord>,
    /// What upper rooms keep, without the `config/` in front.
    config: BTreeMap<String, Value>,
    by_name: HashMap<String, Entity>,
    by_uuid: HashMap<Uuid, Entity>,
    heads: HashMap<NodeId, VolumeId>,
    children: HashMap<NodeId, BTreeSet<NodeId>>,
    chores: HashMap<NodeId, (Chore, i64)>,
    by_chore: BTreeSet<(Chore, i64, NodeId)>,
    ghosts: BTreeSet<NodeId>,
}

/// What is to be done about a deleted node, what gives back most at the least cost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Chore {
    /// Nobody grew from it: all that it owns goes.
    Drop,
    /// It is taken apart for the one that grew from it.
    HandDown,
    /// Several grew from it: what none of them has goes.
    Thin,
}

/// Changes that become true together. `None` = the record goes.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    volumes: BTreeMap<VolumeId, Option<VolumeRecord>>,
    nodes: BTreeMap<NodeId, Option<NodeRecord>>,
    config: BTreeMap<String, Option<Value>>,
}

impl Changes {
    /// Sets or removes a volume.
    pub fn volume(&mut self, id: VolumeId, record: Option<VolumeRecord>) {
        self.volumes.insert(id, record);
    }

    /// Sets or removes a node.
    pub fn node(&mut self, id: NodeId, record: Option<NodeRecord>) {
        self.nodes.insert(id, record);
    }

    /// Sets or removes an entry of upper rooms.
    pub fn config(&mut self, key: &str, value: Option<Value>) {
        self.config.insert(key.to_owned(), value);
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.volumes.is_empty() && self.nodes.is_empty() && self.config.is_empty()
    }

    /// The changes as the catalog takes them, with the pool's numbers as they are now.
    pub fn transaction(&self, pool: &PoolRecord) -> Transaction {
        let mut transaction = Transaction::new();
        transaction.put("pool", json(pool));
        for (id, record) in &self.volumes {
            transaction.set(format!("volume/{:08x}", id.0), record.as_ref().map(json));
        }
        for (id, record) in &self.nodes {
            transaction.set(format!("node/{:08x}", id.0), record.as_ref().map(json));
        }
        for (key, value) in &self.config {
            transaction.set(format!("config/{key}"), value.as_ref().map(json));
        }
        transaction
    }
}

/// A catalog entry that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("catalog entry `{key}` cannot be understood: {why}")]
pub struct RecordError {
    /// Its key.
    pub key: String,
    /// The reason.
    pub why: String,
}

/// Nodes that a pool can have had.
const NODES_MAX: u32 = u32::MAX - 0xFFFF;

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

impl Records {
    /// Of a pool without volumes.
    pub fn new(geometry: Geometry, vdevs: usize) -> Records {
        Records {
            pool: PoolRecord { name: String::new(), epoch: 1, next_node: 1, next_volume: 1 },
            regions: Regions::new(geometry, vdevs),
            volumes: BTreeMap::new(),
            nodes: BTreeMap::new(),
            config: BTreeMap::new(),
            by_name: HashMap::new(),
            by_uuid: HashMap::new(),
            heads: HashMap::new(),
            children: HashMap::new(),
            chores: HashMap::new(),
            by_chore: BTreeSet::new(),
            ghosts: BTreeSet::new(),
        }
    }

    /// Reads everything out of a catalog.
    pub fn read(catalog: &Catalog, geometry: Geometry, vdevs: usize) -> Result<Records, RecordError> {
        fn parse<'a, T: Deserialize<'a>>(key: &str, value: &'a [u8]) -> Result<T, RecordError> {
            serde_json::from_slice(value)
                .map_err(|error| RecordError { key: key.to_owned(), why: error.to_string() })
        }
        let id = |key: &str| {
            let number = key.rsplit('/').next().and_then(|hex| u32::from_str_radix(hex, 16).ok());
            number.ok_or_else(|| RecordError { key: key.to_owned(), why: "no number in the key".into() })
        };
        let missing = || RecordError { key: "pool".into(), why: "it is missing".into() };
        let mut records = Records {
            pool: parse("pool", catalog.get("pool").ok_or_else(missing)?)?,
            ..Records::new(geometry, vdevs)
        };
        let mut all = Changes::default();
        for (key, value) in catalog.scan("volume/") {
            all.volume(VolumeId(id(key)?), Some(parse(key, value)?));
        }
        for (key, value) in catalog.scan("node/") {
            let (id, node) = (id(key)?, parse::<NodeRecord>(key, value)?);
            let why = if node.parent.is_some_and(|parent| parent >= id) {
                "a node's parent must be older than it"
            } else if node.sealed.is_some_and(|epoch| epoch > EPOCH_MAX) || id >= NODES_MAX {
                "a number is out of range"
            } else {
                all.node(NodeId(id), Some(node));
                continue;
            };
            return Err(RecordError { key: key.to_owned(), why: why.into() });
        }
        for (key, value) in catalog.scan("config/") {
            all.config(&key["config/".len()..], Some(parse(key, value)?));
        }
        records.apply(all);
        if records.pool.epoch > EPOCH_MAX / 2 || records.pool.next_node > NODES_MAX {
            return Err(RecordError { key: "pool".into(), why: "a number is out of range".into() });
        }
        if let Some((id, _)) = records.volumes().find(|(_, volume)| !records.is_head(NodeId(volume.head))) {
            let key = format!("volume/{:08x}", id.0);
            return Err(RecordError { key, why: "its head is not there or is being deleted".into() });
        }
        for (key, value) in catalog.scan("region/") {
            let why = |why: &str| RecordError { key: key.to_owned(), why: why.to_owned() };
            records.regions.load(key, value).map_err(why)?;
        }
        Ok(records)
    }

    /// Makes changes that are durable now visible.
    pub fn apply(&mut self, changes: Changes) {
        for (id, record) in changes.volumes {
            if let Some(old) = self.volumes.remove(&id) {
                self.by_name.remove(&old.name);
                self.by_uuid.remove(&old.uuid);
                self.heads.remove(&NodeId(old.head));
            }
            if let Some(record) = record {
                self.by_name.insert(record.name.clone(), Entity::Volume(id));
                self.by_uuid.insert(record.uuid, Entity::Volume(id));
                self.heads.insert(NodeId(record.head), id);
                self.volumes.insert(id, record);
            }
        }
        let mut touched: BTreeSet<NodeId> = BTreeSet::new();
        for (id, record) in changes.nodes {
            touched.insert(id);
            let parents = [self.nodes.get(&id), record.as_ref()].into_iter().flatten();
            touched.extend(parents.filter_map(|record| record.parent.map(NodeId)));
            if let Some(old) = self.nodes.remove(&id) {
                if let Some(name) = &old.name {
                    self.by_name.remove(name);
                    self.by_uuid.remove(&old.uuid);
                }
                if let Some(parent) = old.parent
                    && let Some(siblings) = self.children.get_mut(&NodeId(parent))
                {
                    siblings.remove(&id);
                    if siblings.is_empty() {
                        self.children.remove(&NodeId(parent));
                    }
                }
            }
            if let Some(record) = record {
                if let Some(name) = &record.name {
                    self.by_name.insert(name.clone(), Entity::Snapshot(id));
                    self.by_uuid.insert(record.uuid, Entity::Snapshot(id));
                }
                if let Some(parent) = record.parent {
                    self.children.entry(NodeId(parent)).or_default().insert(id);
                }
                self.nodes.insert(id, record);
            }
        }
        for node in touched {
            self.choose_chore(node);
        }
        for (key, value) in changes.config {
            match value {
                Some(value) => self.config.insert(key, value),
                None => self.config.remove(&key),
            };
        }
    }

    /// What is to be done about a node depends on it and on how many grew from it.
    fn choose_chore(&mut self, id: NodeId) {
        if let Some((chore, order)) = self.chores.remove(&id) {
            self.by_chore.remove(&(chore, order, id));
        }
        self.ghosts.remove(&id);
        let Some(node) = self.nodes.get(&id).filter(|node| node.deleting) else { return };
        if node.ghost {
            self.ghosts.insert(id);
        }
        // What is handed down goes from parent to child; everything else begins with the youngest.
        let heirs = self.children(id).len();
        let is_ghost = |id: NodeId| self.nodes.get(&id).is_some_and(|node| node.ghost);
        let (chore, order) = match heirs {
            0 => (Chore::Drop, -i64::from(id.0)),
            // A ghost is nobody's heir.
            1 if !self.children(id).any(is_ghost) => (Chore::HandDown, i64::from(id.0)),
            _ if node.thinned => return,
            _ => (Chore::Thin, -i64::from(id.0)),
        };
        self.chores.insert(id, (chore, order));
        self.by_chore.insert((chore, order, id));
    }

    /// What is to be done about deleted nodes, in order.
    pub fn chores(&self) -> impl ExactSizeIterator<Item = (Chore, NodeId)> + '_ {
        self.by_chore.iter().map(|(chore, _, id)| (*chore, *id))
    }

    /// Whether deleted nodes hold what several others share.
    pub fn has_ghosts(&self) -> bool {
        !self.ghosts.is_empty()
    }

    fn is_head(&self, node: NodeId) -> bool {
        self.node(node).is_some_and(|node| !node.deleting && node.sealed.is_none())
    }

    /// The entity with this name.
    pub fn named(&self, name: &str) -> Option<Entity> {
        self.by_name.get(name).copied()
    }

    /// The entity with this UUID.
    pub fn with_uuid(&self, uuid: Uuid) -> Option<Entity> {
        self.by_uuid.get(&uuid).copied()
    }

    /// A volume.
    pub fn volume(&self, id: VolumeId) -> Option<&VolumeRecord> {
        self.volumes.get(&id)
    }

    /// All volumes, in the order of their creation.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &VolumeRecord)> {
        self.volumes.iter().map(|(id, record)| (*id, record))
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> Option<&NodeRecord> {
        self.nodes.get(&id)
    }

    /// All nodes, in the order of their creation.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &NodeRecord)> {
        self.nodes.iter().map(|(id, record)| (*id, record))
    }

    /// The volume whose head a node is.
    pub fn volume_of_head(&self, node: NodeId) -> Option<&VolumeRecord> {
        self.volumes.get(self.heads.get(&node)?)
    }

    /// The nodes whose parent is `node`.
    pub fn children(&self, node: NodeId) -> impl ExactSizeIterator<Item = NodeId> + '_ {
        static NONE: BTreeSet<NodeId> = BTreeSet::new();
        self.children.get(&node).unwrap_or(&NONE).iter().copied()
    }

    /// What upper rooms keep.
    pub fn config(&self) -> &BTreeMap<String, Value> {
        &self.config
    }

    /// A number for a new node.
    pub fn next_node(&mut self) -> NodeId {
        let node = NodeId(self.pool.next_node);
        self.pool.next_node += 1;
        node
    }

    /// A number for a new volume.
    pub fn next_volume(&mut self) -> VolumeId {
        let volume = VolumeId(self.pool.next_volume);
        self.pool.next_volume += 1;
        volume
    }
}
