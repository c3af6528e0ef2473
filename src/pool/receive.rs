//! What is being received: a snapshot from elsewhere, written into a volume that nobody sees, until it is whole.
//!
//! ```text
//! begin: a volume with a name that nobody can give, new or a clone of the base
//!   → written through a handle like any other, flushed
//!   → end: its head becomes the snapshot, with the name, identity and age it had where it came from
//! ```
//!
//! The end is one catalog record, like that of any snapshot: before it nothing is visible, after it everything. A volume
//! that is being received survives a crash, as every volume does; whoever opens the pool then deletes it
//! ([`Pool::receiving`](super::Pool::receiving)), as nobody goes on with it.
#![forbid(unsafe_code)]

use uuid::Uuid;

use super::error::PoolError;
use super::home::Home;
use super::info::NodeInfo;
use super::records::{Entity, Records, VolumeRecord};
use super::tree::VolumeId;
use crate::device::IoError;
use crate::reactor::{new_uuid, unix_now};

/// How the names of volumes that are being received begin; no other name can.
const PREFIX: &str = ".receive-";

/// Who a snapshot is, where it is not up to the pool.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// The identity that hosts see.
    pub uuid: Uuid,
    /// Seconds since 1970.
    pub created: u64,
}

/// What is to be received.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveSpec {
    /// Names the undertaking; no two have the same.
    pub session: Uuid,
    /// The snapshot that what comes is the difference from.
    pub base: Option<Uuid>,
    /// Bytes.
    pub size: u64,
    /// Logical block size for hosts: 512 or 4096.
    pub block_size: u32,
}

/// The name of the volume that a session writes.
pub fn receiving_name(session: Uuid) -> String {
    format!("{PREFIX}{session}")
}

/// Whether a name is that of a volume that is being received.
pub(super) fn is_receiving(name: &str) -> bool {
    name.starts_with(PREFIX)
}

impl Records {
    /// Whether this is a volume that is being received.
    pub(super) fn is_receiving(&self, entity: Entity) -> bool {
        match entity {
            Entity::Volume(id) => self.volume(id).is_some_and(|volume| is_receiving(&volume.name)),
            Entity::Snapshot(_) => false,
        }
    }
}

impl Home {
    /// Makes the volume that takes what comes. Nobody sees it; its name is [`receiving_name`].
    pub async fn receive_begin(&self, spec: ReceiveSpec) -> Result<(), PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        if self.check_size(spec.size)? != spec.size {
            return Err(PoolError::invalid(format!("no volume can have {} bytes", spec.size)));
        }
        let parent = spec.base.map(|base| self.find_snapshot(&base.to_string())).transpose()?;
        let origin = match parent {
            Some(parent) => Some(self.records.borrow().node(parent).ok_or(IoError::Gone)?.clone()),
            None => None,
        };
        if let Some(base) = origin.as_ref().filter(|base| base.block_size != spec.block_size) {
            return Err(PoolError::invalid(format!(
                "the base has blocks of {} bytes for hosts, what comes has blocks of {}",
                base.block_size, spec.block_size
            )));
        }
        let name = receiving_name(spec.session);
        let volume = VolumeRecord {
            uuid: new_uuid(),
            name: name.clone(),
            head: 0,
            size: origin.as_ref().map_or(spec.size, |base| base.size),
            block_size: spec.block_size,
            write_cache: true,
            created: unix_now(),
            clear_from: None,
            origin: spec.base,
            pins: Vec::new(),
        };
        self.add_volume(volume, parent).await?;
        drop(lock);
        if origin.is_some_and(|base| base.size != spec.size)
            && let Err(error) = self.resize(&name, spec.size, true).await
        {
            self.receive_abandon(spec.session).await?;
            return Err(error);
        }
        Ok(())
    }

    /// Makes what was received the snapshot `name`. Nobody may have a handle to the volume any more.
    pub async fn receive_end(
        &self,
        session: Uuid,
        name: &str,
        identity: Identity,
    ) -> Result<NodeInfo, PoolError> {
        let lock = self.operations.acquire(1).await;
        self.check()?;
        self.check_name(name)?;
        if self.records.borrow().with_uuid(identity.uuid).is_some() {
            let uuid = identity.uuid;
            return Err(PoolError::exists(format!("there is a volume or snapshot with UUID {uuid} already")));
        }
        let id: VolumeId = self.find_volume(&receiving_name(session))?;
        self.succeed(vec![(id, Some(name.to_owned()), None, Some(identity))]).await?;
        drop(lock);
        if let Err(error) = self.receive_abandon(session).await {
            // The snapshot is there. What is left over is empty, and goes when it is looked for again.
            tracing::warn!("a volume that was received into stays for now: {error}");
        }
        self.brief(name).await
    }

    /// Deletes the volume of a session, whatever it holds. No error when there is none.
    pub async fn receive_abandon(&self, session: Uuid) -> Result<(), PoolError> {
        let name = receiving_name(session);
        match self.records.borrow().named(&name) {
            Some(_) => {}
            None => return Ok(()),
        }
        self.delete(&name).await
    }

    /// The sessions that have a volume here.
    pub fn receiving(&self) -> Vec<Uuid> {
        let records = self.records.borrow();
        let names = records.volumes().filter_map(|(_, volume)| volume.name.strip_prefix(PREFIX));
        names.filter_map(|session| Uuid::parse_str(session).ok()).collect()
    }
}
