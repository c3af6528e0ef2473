//! What is exported: the subsystems as the operator wants them, and their records in the pools.
//!
//! A subsystem that shows volumes is written to the catalog of each pool it takes volumes from, as one record per
//! pool that holds everything but the namespaces of other pools. A change is made in the target, then in the
//! records, and answered when the records are durable; when a record cannot be written the change is taken back.
//! So after a crash an import finds each subsystem as it was last answered for. Subsystems that show only raw
//! devices are not recorded: the configuration file makes them again.
//!
//! All changes go through one lock: two half-done changes of one subsystem must not meet.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use crate::nvme::nqn::DISCOVERY;
use crate::pool::Pool;
use crate::target::{Backend, NamespaceSpec, SubsystemSpec, TargetError};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

/// Where records lie in a pool's catalog; the NQN follows.
const KEY_PREFIX: &str = "subsystem/";

/// What stands behind a namespace, as it can be found again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// A volume or snapshot of a pool, by UUID.
    Node {
        /// The pool's name. Not in the record: it is that of the pool the record lies in.
        #[serde(skip)]
        pool: String,
        /// The node's UUID.
        uuid: Uuid,
    },
    /// An open device, by name.
    Device {
        /// Its name.
        name: String,
    },
}

/// A namespace as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRecord {
    /// Its NSID.
    pub nsid: u32,
    /// What it shows.
    pub place: Place,
    /// Its UUID, when it is not the backend's own.
    pub uuid: Option<Uuid>,
    /// Its NGUID in hexadecimal, when it is not made from the UUID.
    pub nguid: Option<String>,
    /// Its EUI-64 in hexadecimal.
    pub eui64: Option<String>,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Whether hosts may only read, whatever stands behind it.
    #[serde(default)]
    pub read_only: bool,
}

/// A subsystem as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its NQN.
    pub nqn: String,
    /// Its serial number; empty means derived from the NQN.
    pub serial_number: String,
    /// Its model number.
    pub model_number: String,
    /// Whether any host may connect.
    pub allow_any_host: bool,
    /// The highest NSID.
    pub max_namespaces: u32,
    /// The first controller id.
    pub min_cntlid: u16,
    /// The last controller id.
    pub max_cntlid: u16,
    /// Hosts that may connect.
    pub hosts: Vec<String>,
    /// Where it listens.
    pub listeners: Vec<SocketAddr>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceRecord>,
    /// The pools that hold its record.
    #[serde(skip)]
    pub homes: BTreeSet<String>,
}

impl Record {
    /// A subsystem without anything in it.
    pub fn new(spec: &SubsystemSpec) -> Record {
        Record {
            nqn: spec.nqn.clone(),
            serial_number: spec.serial_number.clone(),
            model_number: spec.model_number.clone(),
            allow_any_host: spec.allow_any_host,
            max_namespaces: spec.max_namespaces,
            min_cntlid: spec.min_cntlid,
            max_cntlid: spec.max_cntlid,
            hosts: Vec::new(),
            listeners: Vec::new(),
            namespaces: Vec::new(),
            homes: BTreeSet::new(),
        }
    }

    fn spec(&self) -> SubsystemSpec {
        let mut spec = SubsystemSpec::new(self.nqn.clone());
        spec.serial_number = self.serial_number.clone();
        spec.model_number = self.model_number.clone();
        spec.allow_any_host = self.allow_any_host;
        spec.max_namespaces = self.max_namespaces;
        spec.min_cntlid = self.min_cntlid;
        spec.max_cntlid = self.max_cntlid;
        spec
    }

    /// What of it belongs into a pool.
    fn for_pool(&self, pool: &str) -> Record {
        let mut record = self.clone();
        record.namespaces.retain(|namespace| namespace.place.pool() == Some(pool));
        record
    }
}

impl Place {
    /// The pool it lies in.
    pub fn pool(&self) -> Option<&str> {
        match self {
            Place::Node { pool, .. } => Some(pool),
            Place::Device { .. } => None,
        }
    }

    /// Whether it is that node.
    pub fn is_node(&self, wanted: Uuid) -> bool {
        matches!(self, Place::Node { uuid, .. } if *uuid == wanted)
    }
}

/// A namespace to add.
pub struct Addition {
    /// What it shows.
    pub place: Place,
    /// The handle to it.
    pub backend: Backend,
    /// Its bdev name: a device's name, a node's UUID.
    pub bdev_name: String,
    /// Its NSID; the lowest free one when missing.
    pub nsid: Option<u32>,
    /// Its UUID; the backend's own when missing.
    pub uuid: Option<Uuid>,
    /// Its NGUID.
    pub nguid: Option<String>,
    /// Its EUI-64.
    pub eui64: Option<String>,
    /// Bytes of a logical block; what suits the backend when missing.
    pub block_size: Option<u32>,
    /// Whether hosts may only read, whatever stands behind it.
    pub read_only: bool,
}

/// All subsystems but discovery.
#[derive(Default)]
pub struct Exports {
    records: RefCell<BTreeMap<String, Record>>,
    changing: Mutex<()>,
}

impl Exports {
    /// The right to change subsystems.
    pub async fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// The subsystem of that NQN.
    pub fn get(&self, nqn: &str) -> Option<Record> {
        self.records.borrow().get(nqn).cloned()
    }

    /// Every subsystem, by NQN.
    pub fn all(&self) -> Vec<Record> {
        self.records.borrow().values().cloned().collect()
    }

    /// Namespaces that show this node, as `(NQN, NSID)`.
    pub fn of_node(&self, uuid: Uuid) -> Vec<(String, u32)> {
        self.find(|place| place.is_node(uuid))
    }

    /// Namespaces that show something of this pool.
    pub fn of_pool(&self, name: &str) -> Vec<(String, u32)> {
        self.find(|place| place.pool() == Some(name))
    }

    /// Namespaces that show this device.
    pub fn of_device(&self, wanted: &str) -> Vec<(String, u32)> {
        self.find(|place| matches!(place, Place::Device { name } if name == wanted))
    }

    fn find(&self, wanted: impl Fn(&Place) -> bool) -> Vec<(String, u32)> {
        let records = self.records.borrow();
        let namespaces = records
            .values()
            .flat_map(|record| record.namespaces.iter().map(move |namespace| (&record.nqn, namespace)));
        namespaces
            .filter(|(_, namespace)| wanted(&namespace.place))
            .map(|(nqn, namespace)| (nqn.clone(), namespace.nsid))
            .collect()
    }

    fn set(&self, record: Record) {
        self.records.borrow_mut().insert(record.nqn.clone(), record);
    }

    fn forget(&self, nqn: &str) {
        self.records.borrow_mut().remove(nqn);
    }
}

/// The changes. Each is called under [`Exports::lock`].
impl Daemon {
    /// Creates a subsystem.
    pub(super) fn create_subsystem(&self, spec: SubsystemSpec) -> Result<(), TargetError> {
        let record = Record::new(&spec);
        self.target.create_subsystem(spec)?;
        self.exports.set(record);
        Ok(())
    }

    /// Deletes a subsystem and its records.
    pub(super) async fn delete_subsystem(&self, nqn: &str) -> Result<(), ChangeError> {
        self.target.delete_subsystem(nqn).await?;
        let homes = self.exports.get(nqn).map(|record| record.homes).unwrap_or_default();
        self.exports.forget(nqn);
        for pool in homes {
            self.write_record(&pool, nqn, None).await?;
        }
        Ok(())
    }

    /// Adds a namespace and gives its NSID.
    pub(super) async fn add_namespace(&self, nqn: &str, addition: Addition) -> Result<u32, ChangeError> {
        let record = self.record(nqn)?;
        let mut spec = NamespaceSpec::new(addition.backend, addition.bdev_name);
        spec.nsid = addition.nsid;
        spec.uuid = addition.uuid;
        spec.nguid = addition.nguid.as_deref().and_then(bytes_of_hex);
        spec.eui64 = addition.eui64.as_deref().and_then(bytes_of_hex);
        spec.block_size = addition.block_size.unwrap_or(spec.block_size);
        spec.read_only = addition.read_only;
        let block_size = spec.block_size;
        let nsid = self.target.add_namespace(nqn, spec)?;
        let mut changed = record;
        changed.homes.extend(addition.place.pool().map(str::to_owned));
        changed.namespaces.push(NamespaceRecord {
            nsid,
            place: addition.place,
            uuid: addition.uuid,
            nguid: addition.nguid,
            eui64: addition.eui64,
            block_size,
            read_only: addition.read_only,
        });
        changed.namespaces.sort_by_key(|namespace| namespace.nsid);
        if let Err(error) = self.keep(changed).await {
            let _ = self.target.remove_namespace(nqn, nsid).await;
            return Err(error);
        }
        Ok(nsid)
    }

    /// Removes a namespace.
    pub(super) async fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<(), ChangeError> {
        let mut record = self.record(nqn)?;
        self.target.remove_namespace(nqn, nsid).await?;
        record.namespaces.retain(|namespace| namespace.nsid != nsid);
        self.keep(record).await
    }

    /// Starts to listen.
    pub(super) async fn add_listener(&self, nqn: &str, address: SocketAddr) -> Result<(), ChangeError> {
        if nqn == DISCOVERY {
            return Ok(self.target.add_listener(nqn, address).await?);
        }
        let mut record = self.record(nqn)?;
        self.target.add_listener(nqn, address).await?;
        if !record.listeners.contains(&address) {
            record.listeners.push(address);
        }
        if let Err(error) = self.keep(record).await {
            let _ = self.target.remove_listener(nqn, address).await;
            return Err(error);
        }
        Ok(())
    }

    /// Stops to listen. An address that is recorded but could not be opened at the start is removed as well.
    pub(super) async fn remove_listener(&self, nqn: &str, address: SocketAddr) -> Result<(), ChangeError> {
        if nqn == DISCOVERY {
            return Ok(self.target.remove_listener(nqn, address).await?);
        }
        let mut record = self.record(nqn)?;
        let recorded = record.listeners.contains(&address);
        match self.target.remove_listener(nqn, address).await {
            Err(TargetError::NoListener { .. }) if recorded => {}
            done => done?,
        }
        record.listeners.retain(|known| *known != address);
        self.keep(record).await
    }

    /// Allows a host.
    pub(super) async fn add_host(&self, nqn: &str, host: &str) -> Result<(), ChangeError> {
        let mut record = self.record(nqn)?;
        self.target.add_host(nqn, host)?;
        record.hosts.push(host.to_owned());
        if let Err(error) = self.keep(record).await {
            let _ = self.target.remove_host(nqn, host).await;
            return Err(error);
        }
        Ok(())
    }

    /// Disallows a host and disconnects it.
    pub(super) async fn remove_host(&self, nqn: &str, host: &str) -> Result<(), ChangeError> {
        let mut record = self.record(nqn)?;
        self.target.remove_host(nqn, host).await?;
        record.hosts.retain(|known| known != host);
        self.keep(record).await
    }

    /// Allows any host, or only those in the list.
    pub(super) async fn allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), ChangeError> {
        let mut record = self.record(nqn)?;
        self.target.allow_any_host(nqn, allow).await?;
        record.allow_any_host = allow;
        self.keep(record).await
    }

    /// Brings back what a pool's records name, except that nothing listens yet: a host must not find a subsystem
    /// without its namespaces. What cannot be brought back is logged and stays recorded.
    pub(super) async fn restore_exports(&self, pool_name: &str) -> Vec<(String, SocketAddr)> {
        let Ok(pool) = self.pools.get(pool_name) else { return Vec::new() };
        let mut listeners = Vec::new();
        let stored = pool.config_list(KEY_PREFIX).await.unwrap_or_else(|error| {
            tracing::error!(pool = pool_name, %error, "the recorded exports cannot be read");
            Vec::new()
        });
        for (key, value) in stored {
            let record = match serde_json::from_value::<Record>(value) {
                Ok(record) => record,
                Err(error) => {
                    tracing::error!(pool = pool_name, key, %error, "a recorded subsystem cannot be read");
                    continue;
                }
            };
            let nqn = record.nqn.clone();
            listeners.extend(record.listeners.iter().map(|address| (nqn.clone(), *address)));
            self.restore_subsystem(&pool, record).await;
        }
        listeners
    }

    async fn restore_subsystem(&self, home: &Pool, stored: Record) {
        let nqn = stored.nqn.clone();
        let mut record = match self.exports.get(&nqn) {
            Some(known) => known,
            None => {
                if let Err(error) = self.target.create_subsystem(stored.spec()) {
                    tracing::error!(nqn, %error, "a recorded subsystem cannot be brought back");
                    return;
                }
                Record { namespaces: Vec::new(), hosts: Vec::new(), ..stored.clone() }
            }
        };
        record.homes.insert(home.name().to_owned());
        for host in stored.hosts {
            if !record.hosts.contains(&host) {
                if let Err(error) = self.target.add_host(&nqn, &host) {
                    tracing::error!(nqn, host, %error, "a recorded host cannot be allowed");
                }
                record.hosts.push(host);
            }
        }
        for mut namespace in stored.namespaces {
            if let Place::Node { pool, .. } = &mut namespace.place {
                *pool = home.name().to_owned();
            }
            if let Err(error) = self.restore_namespace(home, &nqn, &namespace).await {
                tracing::error!(
                    nqn,
                    nsid = namespace.nsid,
                    error,
                    "a recorded namespace cannot be brought back"
                );
            }
            record.namespaces.push(namespace);
        }
        self.exports.set(record);
    }

    async fn restore_namespace(
        &self,
        home: &Pool,
        nqn: &str,
        wanted: &NamespaceRecord,
    ) -> Result<(), String> {
        let Place::Node { uuid, .. } = &wanted.place else { return Ok(()) };
        let volume = home.open(&uuid.to_string()).await.map_err(|error| error.text)?;
        let mut spec = NamespaceSpec::new(Backend::Volume(volume), uuid.to_string());
        spec.nsid = Some(wanted.nsid);
        spec.uuid = wanted.uuid;
        spec.nguid = wanted.nguid.as_deref().and_then(bytes_of_hex);
        spec.eui64 = wanted.eui64.as_deref().and_then(bytes_of_hex);
        spec.block_size = wanted.block_size;
        spec.read_only = wanted.read_only;
        self.target.add_namespace(nqn, spec).map(drop).map_err(|error| error.to_string())
    }

    /// Opens the listeners of restored subsystems.
    pub(super) async fn open_listeners(&self, listeners: Vec<(String, SocketAddr)>) {
        for (nqn, error) in self.target.add_listeners(listeners).await {
            tracing::error!(nqn, %error, "a recorded listener cannot be opened");
        }
    }

    /// Takes the exports of a pool out of the target, and leaves their records in the pool.
    pub(super) async fn withdraw_exports(&self, pool: &str) -> Result<(), TargetError> {
        for mut record in self.exports.all() {
            if !record.homes.remove(pool) {
                continue;
            }
            let elsewhere = |namespace: &NamespaceRecord| namespace.place.pool() != Some(pool);
            if record.homes.is_empty() && !record.namespaces.iter().any(elsewhere) {
                self.target.delete_subsystem(&record.nqn).await?;
                self.exports.forget(&record.nqn);
                continue;
            }
            for namespace in record.namespaces.iter().filter(|namespace| !elsewhere(namespace)) {
                match self.target.remove_namespace(&record.nqn, namespace.nsid).await {
                    Ok(()) | Err(TargetError::NoNamespace { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            record.namespaces.retain(elsewhere);
            self.exports.set(record);
        }
        Ok(())
    }

    /// Lets the subsystems live on that had a record in a pool which is gone.
    pub(super) fn forget_home(&self, pool: &str) {
        for mut record in self.exports.all() {
            if record.homes.remove(pool) {
                self.exports.set(record);
            }
        }
    }

    pub(super) fn record(&self, nqn: &str) -> Result<Record, TargetError> {
        self.exports.get(nqn).ok_or_else(|| TargetError::NoSubsystem { nqn: nqn.to_owned() })
    }

    /// Makes a changed record durable in every pool it lies in, then the truth here.
    pub(super) async fn keep(&self, record: Record) -> Result<(), ChangeError> {
        for pool in &record.homes {
            self.write_record(pool, &record.nqn, Some(record.for_pool(pool))).await?;
        }
        self.exports.set(record);
        Ok(())
    }

    async fn write_record(&self, pool: &str, nqn: &str, record: Option<Record>) -> Result<(), ChangeError> {
        // A pool that was exported meanwhile has no exports left that could change.
        let Ok(pool) = self.pools.get(pool) else { return Ok(()) };
        let value = record.map(serde_json::to_value).transpose();
        let value = value.map_err(|error| RpcError::refused(libc::EIO, error.to_string()))?;
        pool.config_put(&format!("{KEY_PREFIX}{nqn}"), value).await.map_err(super::pools::pool_error)?;
        Ok(())
    }
}

/// Why a change was not made.
#[derive(Debug)]
pub enum ChangeError {
    /// The target refused it.
    Target(TargetError),
    /// The record could not be written, or something else refused.
    Refused(RpcError),
}

impl From<TargetError> for ChangeError {
    fn from(error: TargetError) -> ChangeError {
        ChangeError::Target(error)
    }
}

impl From<RpcError> for ChangeError {
    fn from(error: RpcError) -> ChangeError {
        ChangeError::Refused(error)
    }
}

/// The bytes of a hexadecimal number of exactly `N` bytes.
pub fn bytes_of_hex<const N: usize>(digits: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if digits.len() != 2 * N || !digits.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Bytes as upper-case hexadecimal digits, as SPDK writes them.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}
