//! What a pool tells people about itself: volumes, snapshots, space, health.
#![forbid(unsafe_code)]

use serde::Serialize;
use uuid::Uuid;

use super::error::PoolError;
use super::home::Home;
use super::node::NodeId;
use super::pointer::BLOCK_BYTES;
use super::receive::is_receiving;
use super::records::{Entity, Pin};
use super::space::Use;
use super::tree::VolumeId;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// What a volume shall be.
#[derive(Debug, Clone)]
pub struct VolumeSpec {
    /// Its name.
    pub name: String,
    /// Bytes; rounded up to 1 MiB.
    pub size: u64,
    /// Logical block size for hosts: 512 or 4096.
    pub block_size: u32,
    /// False: every write is durable when acknowledged.
    pub write_cache: bool,
    /// Its identity; made up when absent.
    pub uuid: Option<Uuid>,
}

/// Volume or snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeKind {
    /// Takes writes.
    Volume,
    /// Never changes.
    Snapshot,
}

/// A volume or a snapshot as people see it.
#[derive(Debug, Clone, Serialize)]
pub struct NodeInfo {
    /// Name.
    pub name: String,
    /// Volume or snapshot.
    pub kind: NodeKind,
    /// The identity that hosts see.
    pub uuid: Uuid,
    /// The snapshot it grew from.
    pub parent: Option<String>,
    /// Names of the volumes and snapshots that grew from it.
    pub children: Vec<String>,
    /// The volume it was taken of, if that is still there (snapshots).
    pub volume: Option<String>,
    /// That volume's UUID.
    pub volume_uuid: Option<Uuid>,
    /// The UUID of the snapshot it began as, which may be gone (clones).
    pub origin: Option<Uuid>,
    /// Bytes.
    pub size: u64,
    /// Bytes that its tree names.
    pub referenced: u64,
    /// Of these, bytes that it does not share with its parent.
    pub written: u64,
    /// Bytes that deleting it would free. Counted for single nodes; in lists only for volumes, and not for those that
    /// share what a deleted snapshot held with others.
    pub unique: Option<u64>,
    /// Logical block size for hosts.
    pub block_size: u32,
    /// Whether acknowledged writes may wait for a flush.
    pub write_cache: bool,
    /// The epoch that ended with it (snapshots).
    pub epoch: Option<u64>,
    /// Seconds since 1970.
    pub created: u64,
    /// Who wants it to stay.
    pub pins: Vec<Pin>,
}

/// What a rollback did.
#[derive(Debug, Clone, Serialize)]
pub struct RollbackInfo {
    /// The volume.
    pub volume: String,
    /// What it is now as.
    pub snapshot: String,
    /// The snapshot that keeps what it held before.
    pub kept: Option<String>,
}

/// A device of a pool.
#[derive(Debug, Clone, Serialize)]
pub struct PoolDevice {
    /// URI under which it is open.
    pub uri: String,
    /// The identity in its label.
    pub uuid: Uuid,
    /// Bytes that the pool uses of it.
    pub size: u64,
}

/// A pool as people see it. All sizes in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct PoolInfo {
    /// Name.
    pub name: String,
    /// Identity.
    pub uuid: Uuid,
    /// Devices in vdev order.
    pub devices: Vec<PoolDevice>,
    /// Shards.
    pub shards: u16,
    /// Block size.
    pub block_size: u32,
    /// Bytes of a region.
    pub region_bytes: u64,
    /// Room for data and metadata.
    pub capacity: u64,
    /// Data in use.
    pub allocated: u64,
    /// Metadata in use, both copies.
    pub metadata: u64,
    /// Freed, waiting for a commit.
    pub pending_free: u64,
    /// What can still be written.
    pub free: u64,
    /// Epoch of new blocks.
    pub epoch: u64,
    /// Volumes.
    pub volumes: usize,
    /// Snapshots.
    pub snapshots: usize,
    /// Nodes about which the background work that deleting calls for is not done.
    pub deleting: usize,
    /// "ok", or "degraded" when damage was found.
    pub health: &'static str,
    /// Texts that name each damage found since the import.
    pub damage: Vec<String>,
    /// Texts that name what only one of two copies held at the import, as a crash leaves it. It was put right.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unfinished: Vec<String>,
}

/// One shard's part of the sums.
struct Totals {
    data: [u64; 3],
    metadata: [u64; 3],
    damage: Vec<String>,
    unfinished: Vec<String>,
}

/// Blocks (referenced, written) of nodes, over all shards, in the order of the nodes' numbers.
struct Accounts(Vec<(NodeId, u64, u64)>);

impl Accounts {
    /// Adds up what the shards count, each in the order of the nodes' numbers.
    fn sum(shards: Vec<Vec<(NodeId, u64, u64)>>) -> Accounts {
        let mut sums: Vec<(NodeId, u64, u64)> = Vec::new();
        for counts in shards {
            let same = sums.len() == counts.len() && sums.iter().zip(&counts).all(|(a, b)| a.0 == b.0);
            if !same {
                // A node that was made or went between two shards' answers.
                let known = |node| sums.binary_search_by_key(&node, |sum| sum.0).is_ok();
                let more: Vec<_> =
                    counts.iter().filter(|count| !known(count.0)).map(|count| (count.0, 0, 0)).collect();
                sums.extend(more);
                sums.sort_unstable();
            }
            let mut at = 0;
            for (node, referenced, written) in counts {
                while sums[at].0 < node {
                    at += 1;
                }
                sums[at].1 += referenced;
                sums[at].2 += written;
            }
        }
        Accounts(sums)
    }

    fn of(&self, node: NodeId) -> (u64, u64) {
        let found = self.0.binary_search_by_key(&node, |sum| sum.0);
        found.map_or((0, 0), |at| (self.0[at].1, self.0[at].2))
    }
}

impl Home {
    /// The counts of every node, over all shards.
    async fn accounts(&self) -> Result<Accounts, PoolError> {
        let shards = self.owners.each(|shard| async move { shard.state.borrow().nodes.counts() }).await?;
        Ok(Accounts::sum(shards))
    }

    /// The counts of one node, over all shards.
    async fn account(&self, node: NodeId) -> Result<Accounts, PoolError> {
        let shards = self.owners.each(move |shard| async move {
            let mut state = shard.state.borrow_mut();
            vec![(node, state.nodes.referenced(node), state.nodes.slot(node).written)]
        });
        Ok(Accounts::sum(shards.await?))
    }

    fn entity_info(&self, entity: Entity, accounts: &Accounts) -> Option<NodeInfo> {
        let records = self.records.borrow();
        let id = match entity {
            Entity::Volume(volume) => NodeId(records.volume(volume)?.head),
            Entity::Snapshot(node) => node,
        };
        let node = records.node(id)?;
        // A node that is being deleted is nobody's parent in what people see.
        let mut parent = node.parent;
        while let Some(above) = parent.and_then(|parent| records.node(NodeId(parent)))
            && above.deleting
        {
            parent = above.parent;
        }
        let parent = parent.and_then(|parent| records.node(NodeId(parent))?.name.clone());
        let mut children = Vec::new();
        let mut below: Vec<NodeId> = records.children(id).collect();
        while let Some(child) = below.pop() {
            let record = records.node(child)?;
            let head = records.volume_of_head(child);
            match (&record.name, head) {
                (Some(name), _) => children.push(name.clone()),
                (None, Some(volume)) if is_receiving(&volume.name) => {}
                (None, Some(volume)) => children.push(volume.name.clone()),
                (None, None) => below.extend(records.children(child)),
            }
        }
        children.sort_unstable();
        let (referenced, written) = accounts.of(id);
        let of = records.volume(VolumeId(node.volume));
        let info = NodeInfo {
            name: node.name.clone().unwrap_or_default(),
            kind: NodeKind::Snapshot,
            uuid: node.uuid,
            parent,
            children,
            volume: of.map(|volume| volume.name.clone()),
            volume_uuid: of.map(|volume| volume.uuid),
            origin: None,
            size: node.size,
            referenced: referenced * BLOCK,
            written: written * BLOCK,
            unique: None,
            block_size: node.block_size,
            write_cache: false,
            epoch: node.sealed,
            created: node.created,
            pins: records.pins(entity).to_vec(),
        };
        let Entity::Volume(volume) = entity else { return Some(info) };
        // What is left of a deleted snapshot above may be the volume's alone as well.
        let own =
            !node.parent.and_then(|parent| records.node(NodeId(parent))).is_some_and(|node| node.deleting);
        let volume = records.volume(volume)?;
        Some(NodeInfo {
            name: volume.name.clone(),
            kind: NodeKind::Volume,
            uuid: volume.uuid,
            volume: None,
            volume_uuid: None,
            origin: volume.origin,
            size: volume.size,
            unique: own.then_some(written * BLOCK),
            write_cache: volume.write_cache,
            created: volume.created,
            ..info
        })
    }

    /// All volumes and snapshots, as one consistent tree, volumes first, each in the order of creation.
    pub async fn nodes(&self) -> Result<Vec<NodeInfo>, PoolError> {
        let accounts = self.accounts().await?;
        let entities: Vec<Entity> = {
            let records = self.records.borrow();
            let snapshots = records.nodes().filter(|(_, node)| node.name.is_some());
            let volumes = records.volumes().filter(|(_, volume)| !is_receiving(&volume.name));
            let volumes = volumes.map(|(id, _)| Entity::Volume(id));
            volumes.chain(snapshots.map(|(id, _)| Entity::Snapshot(id))).collect()
        };
        Ok(entities.into_iter().filter_map(|entity| self.entity_info(entity, &accounts)).collect())
    }

    /// One volume or snapshot, without what only a walk over its tree could tell (`unique` of a snapshot).
    pub async fn brief(&self, name: &str) -> Result<NodeInfo, PoolError> {
        let entity = self.find(name)?;
        let accounts = self.account(self.node_of(entity)).await?;
        let gone = || PoolError::not_found(format!("'{name}' is gone"));
        self.entity_info(entity, &accounts).ok_or_else(gone)
    }

    /// One volume or snapshot, with what it alone holds.
    pub async fn node(&self, name: &str) -> Result<NodeInfo, PoolError> {
        let entity = self.find(name)?;
        let accounts = self.account(self.node_of(entity)).await?;
        let gone = || PoolError::not_found(format!("'{name}' is gone"));
        let mut info = self.entity_info(entity, &accounts).ok_or_else(gone)?;
        if info.unique.is_none() {
            let (node, mut unique) = (self.node_of(entity), 0);
            for shard in self.owners.each(move |shard| async move { shard.unique(node).await }).await? {
                unique += shard?;
            }
            info.unique = Some(unique * BLOCK);
        }
        Ok(info)
    }

    /// The pool.
    pub async fn info(&self) -> Result<PoolInfo, PoolError> {
        let shards = self
            .owners
            .each(|shard| async move {
                let state = shard.state.borrow();
                let counts = |what| {
                    [
                        state.space.used_count(what),
                        state.space.held_blocks(what),
                        state.space.free_blocks(what),
                    ]
                };
                Totals {
                    data: counts(Use::Data),
                    metadata: counts(Use::Metadata),
                    damage: shard.damage(),
                    unfinished: shard.unfinished.borrow().clone(),
                }
            })
            .await?;
        let sum = |pick: &dyn Fn(&Totals) -> u64| shards.iter().map(pick).sum::<u64>() * BLOCK;
        let records = self.records.borrow();
        let region_bytes = self.geometry.region_bytes();
        let mut damage = self.damage.borrow().clone();
        damage.extend(shards.iter().flat_map(|shard| shard.damage.iter().cloned()));
        let mut unfinished = self.unfinished.borrow().clone();
        unfinished.extend(shards.iter().flat_map(|shard| shard.unfinished.iter().cloned()));
        Ok(PoolInfo {
            name: records.pool.name.clone(),
            uuid: self.uuid,
            devices: self
                .owners
                .devices
                .iter()
                .zip(&self.devices)
                .map(|(device, uuid)| PoolDevice {
                    uri: device.info().uri.clone(),
                    uuid: *uuid,
                    size: self.geometry.device_blocks * BLOCK,
                })
                .collect(),
            shards: self.geometry.shards,
            block_size: BLOCK_BYTES as u32,
            region_bytes,
            capacity: records.regions.total() * region_bytes,
            allocated: sum(&|shard| shard.data[0]),
            metadata: 2 * sum(&|shard| shard.metadata[0]),
            pending_free: sum(&|shard| shard.data[1] + 2 * shard.metadata[1]),
            free: records.regions.free_count() * region_bytes + sum(&|shard| shard.data[2]),
            epoch: records.pool.epoch,
            volumes: records.volumes().filter(|(_, volume)| !is_receiving(&volume.name)).count(),
            snapshots: records.nodes().filter(|(_, node)| node.name.is_some()).count(),
            deleting: records.chores().len(),
            health: if damage.is_empty() { "ok" } else { "degraded" },
            damage,
            unfinished,
        })
    }
}
