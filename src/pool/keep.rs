//! What keeps nodes, and whose they are: pins, and the promotion of a clone to the main line.
//!
//! A pin is a promise to somebody that a volume or snapshot stays. It is part of the node's record in the catalog, so it
//! is durable when it is answered and goes wherever the pool goes.
#![forbid(unsafe_code)]

use uuid::Uuid;

use super::error::PoolError;
use super::home::{Home, check_name};
use super::info::NodeInfo;
use super::node::NodeId;
use super::records::{Changes, Entity, NodeRecord, Pin, Records, VolumeRecord};
use super::sabotage::{Sabotage, is};
use super::tree::VolumeId;
use crate::device::IoError;
use crate::reactor::unix_now;

/// Pins of one node.
const PINS_MAX: usize = 64;
/// Bytes of a pin's reason.
const REASON_MAX: usize = 1000;

impl Records {
    /// The pins of an entity.
    pub(super) fn pins(&self, entity: Entity) -> &[Pin] {
        match entity {
            Entity::Volume(id) => self.volume(id).map_or(&[], |volume| &volume.pins),
            Entity::Snapshot(id) => self.node(id).map_or(&[], |node| &node.pins),
        }
    }

    /// Refuses what would lose a pinned entity, in words that name who pins it.
    pub(super) fn check_unpinned(&self, name: &str, entity: Entity, what: &str) -> Result<(), PoolError> {
        let pins = self.pins(entity);
        if pins.is_empty() {
            return Ok(());
        }
        let said = |pin: &Pin| match &pin.reason {
            Some(reason) => format!("'{}' ({reason})", pin.by),
            None => format!("'{}'", pin.by),
        };
        let by: Vec<String> = pins.iter().map(said).collect();
        Err(PoolError::busy(format!("'{name}' cannot be {what}: it is pinned by {}", by.join(", "))))
    }
}

impl Home {
    /// Sees to it that a volume or snapshot cannot be deleted until `by` unpins it. Pinned again by the same, the reason
    /// is replaced.
    pub async fn pin(&self, name: &str, by: &str, reason: Option<String>) -> Result<NodeInfo, PoolError> {
        check_name("pin", by)?;
        if reason.as_ref().is_some_and(|reason| reason.len() > REASON_MAX) {
            return Err(PoolError::invalid(format!("a reason has at most {REASON_MAX} bytes")));
        }
        let change = |pins: &mut Vec<Pin>| {
            let count = pins.len();
            match pins.iter_mut().find(|pin| pin.by == by) {
                Some(pin) => pin.reason = reason,
                None if count >= PINS_MAX => {
                    return Err(PoolError::invalid(format!("'{name}' has {PINS_MAX} pins already")));
                }
                None => pins.push(Pin { by: by.to_owned(), reason, created: unix_now() }),
            }
            Ok(())
        };
        self.change_pins(name, change).await
    }

    /// Takes the pin of `by` away, if there is one.
    pub async fn unpin(&self, name: &str, by: &str) -> Result<NodeInfo, PoolError> {
        let change = |pins: &mut Vec<Pin>| {
            pins.retain(|pin| pin.by != by);
            Ok(())
        };
        self.change_pins(name, change).await
    }

    /// A volume or snapshot that is pinned, and by whom.
    pub fn first_pin(&self) -> Option<(String, String)> {
        let records = self.records.borrow();
        let volumes = records.volumes().map(|(_, volume)| (Some(&volume.name), &volume.pins));
        let snapshots = records.nodes().map(|(_, node)| (node.name.as_ref(), &node.pins));
        let mut pinned = volumes
            .chain(snapshots)
            .filter_map(|(name, pins)| Some((name?.clone(), pins.first()?.by.clone())));
        pinned.next()
    }

    async fn change_pins(
        &self,
        name: &str,
        change: impl FnOnce(&mut Vec<Pin>) -> Result<(), PoolError>,
    ) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let entity = self.find(name)?;
        let mut pins = self.records.borrow().pins(entity).to_vec();
        let before = pins.len();
        change(&mut pins)?;
        let (mut changes, grows) = (Changes::default(), pins.len() > before);
        {
            let records = self.records.borrow();
            match entity {
                Entity::Volume(id) => {
                    let volume = records.volume(id).ok_or(IoError::Gone)?.clone();
                    changes.volume(id, Some(VolumeRecord { pins, ..volume }));
                }
                Entity::Snapshot(id) => {
                    let node = records.node(id).ok_or(IoError::Gone)?.clone();
                    changes.node(id, Some(NodeRecord { pins, ..node }));
                }
            }
        }
        if is(Sabotage::ForgetPin) {
            self.records.borrow_mut().apply(changes);
            drop(lock);
            return self.brief(name).await;
        }
        match grows {
            true => self.commit_new(changes).await?,
            false => self.commit(changes).await?,
        }
        drop(lock);
        self.brief(name).await
    }

    /// Makes a clone the main line. The snapshots that it shares with the volume it was made from become its own, and that
    /// volume from now on counts as made from the last of them. No data is touched.
    pub async fn promote(&self, name: &str) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let id = self.find_volume(name)?;
        let changes = self.promotion(name, id)?;
        self.commit_new(changes).await?;
        drop(lock);
        self.brief(name).await
    }

    fn promotion(&self, name: &str, id: VolumeId) -> Result<Changes, PoolError> {
        let records = self.records.borrow();
        let volume = records.volume(id).ok_or(IoError::Gone)?;
        let above = |node: &NodeRecord| {
            let parent = NodeId(node.parent?);
            records.node(parent).map(|record| (parent, record))
        };
        let head = records.node(NodeId(volume.head)).ok_or(IoError::Gone)?;
        let mut line = std::iter::successors(above(head), |(_, node)| above(node))
            .skip_while(|(_, node)| node.volume == id.0)
            .peekable();
        let Some((_, origin)) = line.peek().copied() else {
            return Err(PoolError::invalid(format!(
                "'{name}' is no clone: there is nothing to promote it over"
            )));
        };
        let mut changes = Changes::default();
        let (mut branch, of): (Option<Uuid>, u32) = (None, origin.volume);
        for (node, record) in line.take_while(|(_, node)| node.volume == of) {
            // Where the paths part, for people: the last snapshot that is still there.
            branch = branch.or(record.name.is_some().then_some(record.uuid));
            changes.node(node, Some(NodeRecord { volume: id.0, ..record.clone() }));
        }
        let old = records.volume(VolumeId(of));
        let origin = old.and_then(|old| old.origin);
        changes.volume(id, Some(VolumeRecord { origin, ..volume.clone() }));
        if let Some(old) = old {
            let branch = branch.or(volume.origin);
            changes.volume(VolumeId(of), Some(VolumeRecord { origin: branch, ..old.clone() }));
        }
        Ok(changes)
    }
}
