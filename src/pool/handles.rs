//! Handles of open volumes and snapshots: one for each, however often it is opened, as long as anybody has it.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, Weak};

use super::error::PoolError;
use super::home::Home;
use super::io::Source;
use super::pointer::BLOCK_BYTES;
use super::records::Entity;
use super::volume::{Shared, Volume};
use crate::device::IoError;
use crate::reactor::gate::Gate;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl Home {
    /// The handle that is open, if one is.
    pub(super) fn handle_of(&self, source: Source) -> Option<Arc<Shared>> {
        self.handles.borrow().get(&handle_key(source)).and_then(Weak::upgrade)
    }

    /// Marks the handle as gone that may have been opened while what it is for was being deleted.
    pub(super) fn retire(&self, source: Source) {
        if let Some(shared) = self.handle_of(source) {
            shared.gone.store(true, Ordering::Relaxed);
        }
    }

    /// Marks every handle as gone.
    pub(super) fn retire_handles(&self) {
        for shared in self.handles.borrow().values().filter_map(Weak::upgrade) {
            shared.gone.store(true, Ordering::Relaxed);
        }
    }

    /// Names of volumes and snapshots that are open.
    pub(super) fn open_names(&self) -> Vec<String> {
        let handles = self.handles.borrow();
        let open = handles.values().filter_map(Weak::upgrade);
        open.filter_map(|shared| shared.name.read().ok().map(|name| name.clone())).collect()
    }

    /// A handle for the target. One to what is just being deleted ends with that.
    pub fn open(&self, name: &str) -> Result<Volume, PoolError> {
        self.check()?;
        self.open_entity(self.find(name)?)
    }

    pub(super) fn open_entity(&self, entity: Entity) -> Result<Volume, PoolError> {
        let source = match entity {
            Entity::Volume(id) => Source::Volume(id),
            Entity::Snapshot(node) => Source::Node(node),
        };
        if let Some(shared) = self.handle_of(source) {
            return Ok(Volume { shared });
        }
        let records = self.records.borrow();
        let gone = || PoolError::from(IoError::Gone);
        let shared = match entity {
            Entity::Volume(id) => {
                let volume = records.volume(id).ok_or_else(gone)?;
                Shared {
                    owners: Arc::clone(&self.owners),
                    source,
                    name: RwLock::new(volume.name.clone()),
                    uuid: volume.uuid,
                    size: AtomicU64::new(volume.size),
                    block_size: volume.block_size,
                    write_cache: volume.write_cache,
                    gone: AtomicBool::new(false),
                    referenced: self.usage.borrow().get(&id).cloned().unwrap_or_default(),
                    gate: Gate::default(),
                }
            }
            Entity::Snapshot(node) => {
                let record = records.node(node).ok_or_else(gone)?;
                Shared {
                    owners: Arc::clone(&self.owners),
                    source,
                    name: RwLock::new(record.name.clone().unwrap_or_default()),
                    uuid: record.uuid,
                    size: AtomicU64::new(record.size),
                    block_size: record.block_size,
                    write_cache: false,
                    gone: AtomicBool::new(false),
                    referenced: Arc::new(AtomicU64::new(record.size / BLOCK)),
                    gate: Gate::default(),
                }
            }
        };
        let shared = Arc::new(shared);
        let mut handles = self.handles.borrow_mut();
        handles.retain(|_, handle| handle.strong_count() > 0);
        handles.insert(handle_key(source), Arc::downgrade(&shared));
        Ok(Volume { shared })
    }
}

fn handle_key(source: Source) -> u64 {
    match source {
        Source::Volume(volume) => u64::from(volume.0) << 1,
        Source::Node(node) => u64::from(node.0) << 1 | 1,
    }
}
