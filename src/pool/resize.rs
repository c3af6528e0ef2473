//! How volumes grow and shrink. What a shrunk volume had beyond its end is cleared after it is recorded that it has one; a
//! crash in between, or a pool too full to change its maps, only puts that off.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::error::PoolError;
use super::home::Home;
use super::info::NodeInfo;
use super::node::NodeId;
use super::records::{Changes, Entity, NodeRecord, VolumeRecord};
use super::tree::VolumeId;
use crate::device::IoError;

/// When clearing is tried again that failed for want of space.
const RETRY: Duration = Duration::from_secs(5);

impl Home {
    /// Changes a volume's size. Growing adds zeroes; shrinking is refused unless allowed, and loses the end.
    pub async fn resize(&self, name: &str, size: u64, allow_shrink: bool) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        let id = self.find_volume(name)?;
        let size = self.check_size(size)?;
        let old = self.records.borrow().volume(id).ok_or(IoError::Gone)?.size;
        if size < old {
            if !allow_shrink {
                return Err(PoolError::invalid(format!(
                    "'{name}' has {old} bytes; shrinking it to {size} would lose its end (allow it explicitly)"
                )));
            }
            self.records.borrow().check_unpinned(name, Entity::Volume(id), "shrunk")?;
        }
        let volume = self.open_entity(Entity::Volume(id))?;
        if size > old {
            // What an earlier, interrupted shrinking left behind must not come back.
            volume.unmap(id, old, size).await?;
            self.owners.flush().await?;
        }
        let mut changes = Changes::default();
        {
            let records = self.records.borrow();
            let volume = records.volume(id).ok_or(IoError::Gone)?.clone();
            let clear_from = (size < old || volume.clear_from.is_some()).then_some(size);
            let volume = VolumeRecord { size, clear_from, ..volume };
            let head = NodeId(volume.head);
            let node = NodeRecord { size, ..records.node(head).ok_or(IoError::Gone)?.clone() };
            changes.volume(id, Some(volume));
            changes.node(head, Some(node));
        }
        self.commit(changes).await?;
        volume.shared.size.store(size, Ordering::Relaxed);
        // The size is what was asked for, whatever becomes of the end.
        if self.clear(id).await.is_err() {
            self.wake_clearing();
        }
        // The handle first: who gets the lock may be about to close the pool, which no handle may outlive.
        drop((volume, lock));
        self.node(name).await
    }

    /// Gives back what lies beyond the end of a volume that was shrunk.
    async fn clear(&self, id: VolumeId) -> Result<(), PoolError> {
        let record = self.records.borrow().volume(id).cloned();
        let Some(record) = record.filter(|record| record.clear_from.is_some()) else { return Ok(()) };
        let volume = self.open_entity(Entity::Volume(id))?;
        volume.unmap(id, record.size, self.size_max()).await?;
        // Only when it is durable may it be forgotten that it was to be done.
        self.owners.flush().await?;
        let mut changes = Changes::default();
        changes.volume(id, Some(VolumeRecord { clear_from: None, ..record }));
        self.commit(changes).await
    }

    /// Ends what a crash interrupted, in the background.
    pub(super) fn resume(&self) {
        self.wake_reaper();
        self.wake_clearing();
    }

    /// Clears the ends of volumes that were shrunk, unless that is under way.
    fn wake_clearing(&self) {
        if self.clearing.replace(true) {
            return;
        }
        let key = self.owners.key;
        crate::reactor::spawn(async move {
            while let Some(home) = super::lifecycle::home(key)
                && !home.closed.get()
            {
                let Err(error) = home.clear_all().await else {
                    home.clearing.set(false);
                    return;
                };
                tracing::warn!("a volume that was shrunk keeps space for now: {error}");
                drop(home);
                crate::reactor::sleep(RETRY).await;
            }
        });
    }

    async fn clear_all(&self) -> Result<(), PoolError> {
        let _lock = self.operations.acquire(1).await;
        let shrunk: Vec<VolumeId> = {
            let records = self.records.borrow();
            records.volumes().filter(|(_, volume)| volume.clear_from.is_some()).map(|(id, _)| id).collect()
        };
        for id in shrunk {
            self.check()?;
            self.clear(id).await?;
        }
        Ok(())
    }
}
