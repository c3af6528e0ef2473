//! The pool as a whole, on its home reactor: the catalog, the tree of nodes, and the operations on them.
//!
//! Operations are made one at a time. Each is true from the moment its catalog record is durable; shards are told
//! before (a snapshot, whose fence they must keep) or after (everything else), and after a crash they are told again.
//!
//! **A snapshot** never copies: the head *becomes* the snapshot, and a new head that inherits from it goes on.
//!
//! ```text
//! fence every shard → all quiet → seal every shard: writes go on to the new head in the next epoch
//!                   → journals → devices flushed → catalog record → answered
//! ```
//!
//! When nothing was written since the last flush, the journals wait for the next one: all that the snapshot holds is
//! durable, and the catalog alone says what belongs to the new head.
//!
//! Until the record is durable no shard commits, so a crash finds either both or neither: journal records for a head
//! that the catalog never heard of belong to the head before it.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::catalog::{Catalog, Transaction};
use super::diff::Holds;
use super::error::PoolError;
use super::event::{EventSink, PoolEventKind};
use super::info::{NodeInfo, NodeKind, RollbackInfo, VolumeSpec};
use super::io::Source;
use super::label::Geometry;
use super::local::Owners;
use super::node::NodeId;
use super::pointer::{CHUNK_BYTES, LEAVES_MAX};
use super::receive::Identity;
use super::records::{Changes, Entity, NodeRecord, Records, VolumeRecord};
use super::sabotage::{Sabotage, is};
use super::scrub::Scrub;
use super::tree::VolumeId;
use super::volume::Shared;
use crate::device::IoError;
use crate::reactor::sync::Semaphore;
use crate::reactor::{new_uuid, unix_now};

/// Longest name in bytes.
const NAME_MAX: usize = 223;
/// Longest key of what upper rooms keep, bytes.
const CONFIG_KEY_MAX: usize = 1024;
/// Volumes of one group snapshot: their seals must fit into what the journal keeps free for them.
const GROUP_MAX: usize = 512;

/// How one volume's head ends and another goes on: the volume, the name under which the old head lives on (`None`: it is
/// deleted), the node that the new head grows from (`None`: the old one), and who the old head is from now on (`None`:
/// somebody new).
pub(super) type Succession = (VolumeId, Option<String>, Option<NodeId>, Option<Identity>);

/// A pool on its home reactor.
pub(super) struct Home {
    pub(super) uuid: Uuid,
    pub(super) devices: Vec<Uuid>,
    pub(super) geometry: Geometry,
    pub(super) owners: Arc<Owners>,
    pub(super) records: RefCell<Records>,
    pub(super) catalog: RefCell<Option<Catalog>>,
    pub(super) catalog_lock: Semaphore,
    pub(super) operations: Semaphore,
    pub(super) handles: RefCell<BTreeMap<u64, Weak<Shared>>>,
    pub(super) usage: RefCell<BTreeMap<VolumeId, Arc<AtomicU64>>>,
    pub(super) reaper: Cell<bool>,
    /// The ends of volumes that were shrunk are being cleared.
    pub(super) clearing: Cell<bool>,
    pub(super) holds: Holds,
    pub(super) closed: Cell<bool>,
    pub(super) events: Option<EventSink>,
    pub(super) damage: RefCell<Vec<String>>,
    /// What a crash left in one of two copies alone.
    pub(super) unfinished: RefCell<Vec<String>>,
    /// Checks are made one at a time.
    pub(super) checks: Semaphore,
    pub(super) scrub: Scrub,
    /// Ghosts that were thinned since the pool was opened: what their counts say of them is all there is.
    pub(super) looked_at: RefCell<BTreeSet<NodeId>>,
    /// How long the last snapshot or rollback kept its volumes from starting writes.
    pub(super) last_fence: Cell<Option<Duration>>,
}

impl Home {
    pub(super) fn new(
        uuid: Uuid,
        devices: Vec<Uuid>,
        geometry: Geometry,
        owners: Arc<Owners>,
        records: Records,
        catalog: Catalog,
        events: Option<EventSink>,
    ) -> Home {
        let usage = records.volumes().map(|(id, _)| (id, Arc::default())).collect();
        Home {
            uuid,
            devices,
            geometry,
            owners,
            records: RefCell::new(records),
            catalog: RefCell::new(Some(catalog)),
            catalog_lock: Semaphore::new(1),
            operations: Semaphore::new(1),
            handles: RefCell::default(),
            usage: RefCell::new(usage),
            reaper: Cell::new(false),
            clearing: Cell::new(false),
            holds: Holds::default(),
            closed: Cell::new(false),
            events,
            damage: RefCell::default(),
            unfinished: RefCell::default(),
            checks: Semaphore::new(1),
            scrub: Scrub::new(),
            looked_at: RefCell::default(),
            last_fence: Cell::new(None),
        }
    }

    /// Makes changes durable, then visible.
    pub(super) async fn commit(&self, changes: Changes) -> Result<(), PoolError> {
        let transaction = changes.transaction(&self.records.borrow().pool);
        self.commit_transaction(transaction).await?;
        self.records.borrow_mut().apply(changes);
        Ok(())
    }

    /// As [`commit`](Home::commit), if the catalog has room for something new.
    pub(super) async fn commit_new(&self, changes: Changes) -> Result<(), PoolError> {
        self.admit(&changes).await?;
        self.commit(changes).await
    }

    async fn admit(&self, changes: &Changes) -> Result<(), PoolError> {
        let _lock = self.catalog_lock.acquire(1).await;
        let transaction = changes.transaction(&self.records.borrow().pool);
        let catalog = self.catalog.borrow();
        Ok(catalog.as_ref().ok_or(IoError::Gone)?.admit(&transaction)?)
    }

    /// Makes a transaction durable. One that fails on a device leaves the pool without a catalog until it is imported
    /// again.
    pub(super) async fn commit_transaction(&self, transaction: Transaction) -> Result<(), PoolError> {
        let _lock = self.catalog_lock.acquire(1).await;
        let mut catalog = self.catalog.borrow_mut().take().ok_or(IoError::Gone)?;
        let done = catalog.commit(transaction).await;
        *self.catalog.borrow_mut() = Some(catalog);
        Ok(done?)
    }

    /// The catalog's blocks in use, of a pool on one device.
    #[cfg(test)]
    pub(super) fn live_catalog(&self) -> Vec<u64> {
        let catalog = self.catalog.borrow();
        catalog.iter().flat_map(|catalog| catalog.live()).map(|(_, block)| block).collect()
    }

    pub(super) fn check(&self) -> Result<(), PoolError> {
        match self.closed.get() {
            true => Err(PoolError::not_found("the pool is being exported")),
            false => Ok(()),
        }
    }

    pub(super) fn check_name(&self, name: &str) -> Result<(), PoolError> {
        check_name("volume or snapshot", name)?;
        match self.records.borrow().named(name) {
            Some(_) => {
                Err(PoolError::exists(format!("there is a volume or snapshot named '{name}' already")))
            }
            None => Ok(()),
        }
    }

    /// The entity with this UUID or name. The UUID first, so that no name can stand in for it.
    pub(super) fn find(&self, name: &str) -> Result<Entity, PoolError> {
        let records = self.records.borrow();
        let by_uuid = Uuid::parse_str(name).ok().and_then(|uuid| records.with_uuid(uuid));
        // A volume that is being received goes by its own name alone.
        let by_uuid = by_uuid.filter(|entity| !records.is_receiving(*entity));
        let found = by_uuid.or_else(|| records.named(name));
        found.ok_or_else(|| {
            let pool = &records.pool.name;
            PoolError::not_found(format!("pool '{pool}' has no volume or snapshot named '{name}'"))
        })
    }

    pub(super) fn find_volume(&self, name: &str) -> Result<VolumeId, PoolError> {
        match self.find(name)? {
            Entity::Volume(id) => Ok(id),
            Entity::Snapshot(_) => {
                Err(PoolError::invalid(format!("'{name}' is a snapshot; a volume is needed")))
            }
        }
    }

    pub(super) fn find_snapshot(&self, name: &str) -> Result<NodeId, PoolError> {
        match self.find(name)? {
            Entity::Snapshot(id) => Ok(id),
            Entity::Volume(_) => Err(PoolError::invalid(format!(
                "'{name}' is a volume; a snapshot is needed (make one with 'snapshot create {name}@NAME')"
            ))),
        }
    }

    /// Whether a volume grew from a snapshot, or the snapshot was taken of it.
    pub fn is_of(&self, volume: &str, snapshot: &str) -> Result<bool, PoolError> {
        let (volume, snapshot) = (self.find_volume(volume)?, self.find_snapshot(snapshot)?);
        let records = self.records.borrow();
        if records.node(snapshot).is_some_and(|node| node.volume == volume.0) {
            return Ok(true);
        }
        let head = records.volume(volume).map(|volume| NodeId(volume.head));
        let above = |node: &NodeId| records.node(*node)?.parent.map(NodeId);
        Ok(std::iter::successors(head, above).any(|node| node == snapshot))
    }

    /// The node that an entity's data is in.
    pub(super) fn node_of(&self, entity: Entity) -> NodeId {
        match entity {
            Entity::Snapshot(node) => node,
            Entity::Volume(volume) => {
                NodeId(self.records.borrow().volume(volume).map_or(0, |volume| volume.head))
            }
        }
    }

    pub(super) fn size_max(&self) -> u64 {
        LEAVES_MAX * CHUNK_BYTES * self.owners.reactors.len() as u64
    }

    pub(super) fn check_size(&self, size: u64) -> Result<u64, PoolError> {
        let max = self.size_max();
        match size {
            0 => Err(PoolError::invalid("a volume cannot have a size of 0")),
            size if size > max => Err(PoolError::invalid(format!(
                "{size} bytes are more than a volume of this pool can have ({max})"
            ))),
            size => Ok(size.next_multiple_of(CHUNK_BYTES)),
        }
    }

    /// Creates a thin volume.
    pub async fn volume_create(&self, spec: VolumeSpec) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        self.check_name(&spec.name)?;
        let size = self.check_size(spec.size)?;
        if ![512, 4096].contains(&spec.block_size) {
            return Err(PoolError::invalid(format!(
                "block size {} is neither 512 nor 4096",
                spec.block_size
            )));
        }
        let uuid = spec.uuid.unwrap_or_else(new_uuid);
        if self.records.borrow().with_uuid(uuid).is_some() {
            return Err(PoolError::exists(format!("there is a volume or snapshot with UUID {uuid} already")));
        }
        let volume = VolumeRecord {
            uuid,
            name: spec.name.clone(),
            head: 0,
            size,
            block_size: spec.block_size,
            write_cache: spec.write_cache,
            created: unix_now(),
            clear_from: None,
            origin: None,
            pins: Vec::new(),
        };
        self.add_volume(volume, None).await?;
        drop(lock);
        self.node(&spec.name).await
    }

    /// Creates a volume that starts as a snapshot is.
    pub async fn clone_create(&self, snapshot: &str, name: &str) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let parent = self.find_snapshot(snapshot)?;
        self.check_name(name)?;
        let volume = {
            let records = self.records.borrow();
            let node = records.node(parent).ok_or(IoError::Gone)?;
            let origin = records.volume(VolumeId(node.volume));
            VolumeRecord {
                uuid: new_uuid(),
                name: name.to_owned(),
                head: 0,
                size: node.size,
                block_size: node.block_size,
                write_cache: origin.is_none_or(|origin| origin.write_cache),
                created: unix_now(),
                clear_from: None,
                origin: Some(node.uuid),
                pins: Vec::new(),
            }
        };
        self.add_volume(volume, Some(parent)).await?;
        drop(lock);
        self.node(name).await
    }

    pub(super) async fn add_volume(
        &self,
        mut volume: VolumeRecord,
        parent: Option<NodeId>,
    ) -> Result<(), PoolError> {
        let (id, head) = {
            let mut records = self.records.borrow_mut();
            (records.next_volume(), records.next_node())
        };
        volume.head = head.0;
        let name = volume.name.clone();
        let node = NodeRecord::head(parent, &volume, id);
        let lineage = node.lineage();
        let mut changes = Changes::default();
        changes.volume(id, Some(volume));
        changes.node(head, Some(node));
        self.commit_new(changes).await?;
        self.tell(PoolEventKind::Created { kind: NodeKind::Volume, name });
        let usage = Arc::new(AtomicU64::new(0));
        self.usage.borrow_mut().insert(id, Arc::clone(&usage));
        self.owners
            .each(move |shard| async move {
                shard.set_lineage(head, lineage);
                shard.set_volume(id, head, Arc::clone(&usage));
                let referenced = shard.state.borrow_mut().nodes.referenced(head);
                usage.fetch_add(referenced, Ordering::Relaxed);
            })
            .await?;
        Ok(())
    }

    /// Makes the present state of volumes, as one instant, their snapshots. Pairs of (volume, snapshot name).
    pub async fn snapshot_create(&self, wanted: &[(String, String)]) -> Result<Vec<NodeInfo>, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        if wanted.len() > GROUP_MAX {
            let count = wanted.len();
            return Err(PoolError::invalid(format!(
                "{count} volumes are more than one instant can take ({GROUP_MAX})"
            )));
        }
        let mut changes: Vec<Succession> = Vec::new();
        for (i, (volume, name)) in wanted.iter().enumerate() {
            self.check_name(name)?;
            let id = self.find_volume(volume)?;
            if wanted[..i].iter().zip(&changes).any(|((_, named), (other, ..))| named == name || *other == id)
            {
                return Err(PoolError::invalid(format!("'{volume}' or '{name}' is named twice")));
            }
            changes.push((id, Some(name.clone()), None, None));
        }
        self.succeed(changes).await?;
        drop(lock);
        let mut infos = Vec::new();
        for (_, name) in wanted {
            infos.push(self.brief(name).await?);
        }
        Ok(infos)
    }

    /// Lets a volume be as one of its pool's snapshots is. What it held becomes the snapshot `keep`, or is deleted.
    pub async fn rollback(
        &self,
        volume: &str,
        snapshot: &str,
        keep: Option<String>,
    ) -> Result<RollbackInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let (id, target) = (self.find_volume(volume)?, self.find_snapshot(snapshot)?);
        match &keep {
            Some(keep) => self.check_name(keep)?,
            None => self.records.borrow().check_unpinned(volume, Entity::Volume(id), "discarded")?,
        }
        self.succeed(vec![(id, keep.clone(), Some(target), None)]).await?;
        let (size, handles) = {
            let records = self.records.borrow();
            (records.node(target).map(|node| node.size), self.handle_of(Source::Volume(id)))
        };
        if let (Some(size), Some(shared)) = (size, handles) {
            shared.size.store(size, Ordering::Relaxed);
        }
        drop(lock);
        Ok(RollbackInfo { volume: volume.to_owned(), snapshot: snapshot.to_owned(), kept: keep })
    }

    /// Ends the heads of volumes and lets new ones go on, all in one instant.
    pub(super) async fn succeed(&self, successions: Vec<Succession>) -> Result<(), PoolError> {
        let volumes: Vec<VolumeId> = successions.iter().map(|(volume, ..)| *volume).collect();
        let names: Vec<String> = successions.iter().filter_map(|(_, name, ..)| name.clone()).collect();
        let (mut seals, mut lineages, mut changes) = (Vec::new(), Vec::new(), Changes::default());
        let epoch = {
            let mut records = self.records.borrow_mut();
            let sealed = records.pool.epoch;
            records.pool.epoch += 1;
            for (id, name, parent, identity) in successions {
                let identity = identity.unwrap_or_else(|| Identity { uuid: new_uuid(), created: unix_now() });
                let mut volume = records.volume(id).ok_or(IoError::Gone)?.clone();
                let old = NodeId(volume.head);
                let node = NodeRecord {
                    sealed: Some(sealed),
                    deleting: name.is_none(),
                    name,
                    created: identity.created,
                    uuid: identity.uuid,
                    ..records.node(old).ok_or(IoError::Internal("a volume has no head"))?.clone()
                };
                volume.size = match parent {
                    Some(parent) => records.node(parent).ok_or(IoError::Gone)?.size,
                    None => node.size,
                };
                let head = records.next_node();
                volume.head = head.0;
                let successor = NodeRecord::head(Some(parent.unwrap_or(old)), &volume, id);
                lineages.extend([(old, node.lineage()), (head, successor.lineage())]);
                changes.node(old, Some(node));
                changes.node(head, Some(successor));
                changes.volume(id, Some(volume));
                seals.push((id, old, head));
            }
            records.pool.epoch
        };
        self.admit(&changes).await?;
        let owners = &self.owners;
        for result in owners.each(|shard| async move { shard.make_journal_room().await }).await? {
            result?;
        }
        let fenced = Instant::now();
        owners.each(move |shard| async move { shard.fence(&volumes) }).await?;
        let usages: Vec<_> =
            seals.iter().map(|(id, ..)| self.usage.borrow().get(id).cloned().unwrap_or_default()).collect();
        let sealed = owners
            .each(move |shard| async move {
                if is(Sabotage::SealLate) && shard.index == 0 {
                    crate::reactor::sleep(std::time::Duration::from_millis(2)).await;
                }
                let durable = shard.is_durable() || is(Sabotage::ForgetSnapshotFlush);
                shard.seal(&seals, &lineages, epoch);
                let mut state = shard.state.borrow_mut();
                let referenced = seals.iter().map(|(_, _, head)| state.nodes.referenced(*head));
                (durable, referenced.collect::<Vec<u64>>())
            })
            .await?;
        self.last_fence.set(Some(fenced.elapsed()));
        for (i, usage) in usages.iter().enumerate() {
            usage.store(sealed.iter().map(|(_, referenced)| referenced[i]).sum(), Ordering::Relaxed);
        }
        let recorded = async {
            if !sealed.iter().all(|(durable, _)| *durable) {
                owners.flush().await?;
            }
            self.commit(changes).await
        };
        if let Err(error) = recorded.await {
            // The shards are ahead of the catalog. An import finds the state before.
            owners.fail("a snapshot could not be recorded").await;
            return Err(error);
        }
        owners.each(|shard| async move { shard.settle() }).await?;
        for name in names {
            self.tell(PoolEventKind::Created { kind: NodeKind::Snapshot, name });
        }
        self.wake_reaper();
        Ok(())
    }

    /// Deletes a volume or a snapshot. Its space comes back in the background.
    pub async fn delete(&self, name: &str) -> Result<(), PoolError> {
        let _lock = self.operations.acquire(1).await;
        self.check()?;
        let entity = self.find(name)?;
        let source = match entity {
            Entity::Volume(id) => Source::Volume(id),
            Entity::Snapshot(node) => Source::Node(node),
        };
        if self.handle_of(source).is_some() {
            return Err(PoolError::busy(format!("'{name}' is in use: unexport it first")));
        }
        let node = self.node_of(entity);
        let mut changes = Changes::default();
        let deleted = {
            let records = self.records.borrow();
            records.check_unpinned(name, entity, "deleted")?;
            let record = records.node(node).ok_or(IoError::Gone)?.clone();
            let kind = match entity {
                Entity::Volume(_) => NodeKind::Volume,
                Entity::Snapshot(_) => NodeKind::Snapshot,
            };
            let mut deleted = record.name.clone();
            if let Entity::Volume(id) = entity {
                deleted = records.volume(id).map(|volume| volume.name.clone());
                changes.volume(id, None);
            }
            let sealed = record.sealed.or(Some(records.pool.epoch));
            changes.node(node, Some(NodeRecord { name: None, deleting: true, sealed, ..record }));
            PoolEventKind::Deleted { kind, name: deleted.unwrap_or_default() }
        };
        self.commit(changes).await?;
        self.retire(source);
        self.tell(deleted);
        if let Entity::Volume(id) = entity {
            self.usage.borrow_mut().remove(&id);
            self.owners.each(move |shard| async move { shard.remove_volume(id) }).await?;
        }
        self.wake_reaper();
        Ok(())
    }

    /// Gives a volume or a snapshot another name.
    pub async fn rename(&self, name: &str, new: &str) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let entity = self.find(name)?;
        self.check_name(new)?;
        let mut changes = Changes::default();
        let source = {
            let records = self.records.borrow();
            match entity {
                Entity::Volume(id) => {
                    let volume = records.volume(id).ok_or(IoError::Gone)?.clone();
                    changes.volume(id, Some(VolumeRecord { name: new.to_owned(), ..volume }));
                    Source::Volume(id)
                }
                Entity::Snapshot(id) => {
                    let node = records.node(id).ok_or(IoError::Gone)?.clone();
                    changes.node(id, Some(NodeRecord { name: Some(new.to_owned()), ..node }));
                    Source::Node(id)
                }
            }
        };
        self.commit_new(changes).await?;
        if let Some(shared) = self.handle_of(source)
            && let Ok(mut name) = shared.name.write()
        {
            *name = new.to_owned();
        }
        drop(lock);
        self.brief(new).await
    }

    /// Keeps a value for upper rooms, durable when this returns; `None` removes it.
    pub async fn config_put(&self, key: &str, value: Option<serde_json::Value>) -> Result<(), PoolError> {
        let _turn = self.operations.acquire(1).await;
        self.check()?;
        if key.len() > CONFIG_KEY_MAX {
            return Err(PoolError::invalid(format!(
                "a key of {} bytes: {CONFIG_KEY_MAX} at most",
                key.len()
            )));
        }
        let mut changes = Changes::default();
        let adds = value.is_some();
        changes.config(key, value);
        match adds {
            true => self.commit_new(changes).await,
            false => self.commit(changes).await,
        }
    }
}

impl NodeRecord {
    /// A head for a volume.
    fn head(parent: Option<NodeId>, volume: &VolumeRecord, id: VolumeId) -> NodeRecord {
        NodeRecord {
            uuid: new_uuid(),
            name: None,
            parent: parent.map(|parent| parent.0),
            sealed: None,
            size: volume.size,
            block_size: volume.block_size,
            volume: id.0,
            created: unix_now(),
            deleting: false,
            ghost: false,
            thinned: false,
            pins: Vec::new(),
        }
    }
}

pub(super) fn check_name(what: &str, name: &str) -> Result<(), PoolError> {
    // Volumes and snapshots are addressed by their UUIDs too: a name must not look like that of another.
    if Uuid::try_parse(name).is_ok() {
        return Err(PoolError::invalid(format!("'{name}' cannot name a {what}: it reads as a UUID")));
    }
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    let others = name.chars().all(|c| c.is_ascii_alphanumeric() || "._:@+-".contains(c));
    match first && others && name.len() <= NAME_MAX {
        true => Ok(()),
        false => Err(PoolError::invalid(format!(
            "'{}' cannot name a {what}: 1 to {NAME_MAX} letters, digits or . _ : @ + -, a letter or digit first",
            name.escape_debug()
        ))),
    }
}
