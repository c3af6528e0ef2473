//! What is exported: the subsystems as the operator wants them.
//!
//! A subsystem that shows volumes is recorded in the catalog of each pool it takes volumes from, as one record per
//! pool that holds everything but the namespaces of other pools. Subsystems that show only raw devices are not
//! recorded: the configuration file makes them again.
//!
//! [`changes`](super::changes) says how a subsystem changes, [`restore`](super::restore) how it comes back.
#![forbid(unsafe_code)]

use super::deleted::Deletion;
use super::error::RpcError;
use crate::target::{Backend, NamespaceSpec, SubsystemSpec, TargetError};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use tokio::sync::{Mutex, MutexGuard};
use uuid::Uuid;

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
    /// Its ANA group, when it is not its own.
    #[serde(default)]
    pub anagrpid: Option<u32>,
}

/// How an address reaches a subsystem's namespaces, where that is not as usual.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessRecord {
    /// The address it listens on.
    pub address: SocketAddr,
    /// The ANA group; all that have no record of their own when missing.
    pub anagrpid: Option<u32>,
    /// The state, by name.
    pub ana_state: String,
}

/// A subsystem as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its NQN.
    pub nqn: String,
    /// Which subsystem of that NQN it is, where one was deleted and another made; nil in old records.
    #[serde(default)]
    pub id: Uuid,
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
    /// Whether hosts are told how its listeners reach the namespaces.
    #[serde(default)]
    pub ana_reporting: bool,
    /// How they do.
    #[serde(default)]
    pub access: Vec<AccessRecord>,
    /// Its namespaces.
    pub namespaces: Vec<NamespaceRecord>,
    /// Counts the changes since it was first recorded: of two pools' records of one subsystem the newer counts.
    #[serde(default)]
    pub generation: u64,
    /// All pools that hold its record, also those that are away.
    #[serde(default)]
    pub pools: BTreeSet<Uuid>,
    /// Recorded namespaces that could not be brought back: nobody sees them, and they stay recorded.
    #[serde(skip)]
    pub unresolved: Vec<NamespaceRecord>,
    /// The pools that hold its record and are here, by name.
    #[serde(skip)]
    pub homes: BTreeSet<String>,
}

impl Record {
    /// A subsystem without anything in it.
    pub fn new(spec: &SubsystemSpec) -> Record {
        Record {
            nqn: spec.nqn.clone(),
            id: Uuid::new_v4(),
            serial_number: spec.serial_number.clone(),
            model_number: spec.model_number.clone(),
            allow_any_host: spec.allow_any_host,
            max_namespaces: spec.max_namespaces,
            min_cntlid: spec.min_cntlid,
            max_cntlid: spec.max_cntlid,
            hosts: Vec::new(),
            listeners: Vec::new(),
            ana_reporting: spec.ana_reporting,
            access: Vec::new(),
            namespaces: Vec::new(),
            generation: 0,
            pools: BTreeSet::new(),
            unresolved: Vec::new(),
            homes: BTreeSet::new(),
        }
    }

    /// What the target must be told to make it.
    pub fn spec(&self) -> SubsystemSpec {
        let mut spec = SubsystemSpec::new(self.nqn.clone());
        spec.serial_number = self.serial_number.clone();
        spec.model_number = self.model_number.clone();
        spec.allow_any_host = self.allow_any_host;
        spec.max_namespaces = self.max_namespaces;
        spec.min_cntlid = self.min_cntlid;
        spec.max_cntlid = self.max_cntlid;
        spec.ana_reporting = self.ana_reporting;
        spec
    }

    /// Sets how an address reaches a group, or all of them.
    pub fn set_access(&mut self, address: SocketAddr, anagrpid: Option<u32>, ana_state: &str) {
        let is_covered = |known: &AccessRecord| {
            known.address == address && (anagrpid.is_none() || known.anagrpid == anagrpid)
        };
        self.access.retain(|known| !is_covered(known));
        self.access.push(AccessRecord { address, anagrpid, ana_state: ana_state.to_owned() });
    }

    /// What of it belongs into a pool.
    pub fn for_pool(&self, pool: &str) -> Record {
        let mut record = self.clone();
        record.namespaces.append(&mut record.unresolved);
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

impl NamespaceRecord {
    /// What the target must be told to make it.
    pub fn spec(&self, backend: Backend, bdev_name: String) -> NamespaceSpec {
        let mut spec = NamespaceSpec::new(backend, bdev_name);
        spec.nsid = Some(self.nsid);
        spec.uuid = self.uuid;
        spec.nguid = self.nguid.as_deref().and_then(bytes_of_hex);
        spec.eui64 = self.eui64.as_deref().and_then(bytes_of_hex);
        spec.block_size = self.block_size;
        spec.read_only = self.read_only;
        spec.ana_group = self.anagrpid;
        spec
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
    /// Its ANA group; one of its own when missing.
    pub anagrpid: Option<u32>,
}

/// All subsystems but discovery.
#[derive(Default)]
pub struct Exports {
    records: RefCell<BTreeMap<String, Record>>,
    /// Deleted ones of which a pool that is away has a record, by [`Record::id`].
    pub(super) deleted: RefCell<BTreeMap<Uuid, Deletion>>,
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

    /// Remembers a subsystem as it is now.
    pub fn set(&self, record: Record) {
        self.records.borrow_mut().insert(record.nqn.clone(), record);
    }

    /// A pool is destroyed: no record of it will ever come back.
    pub fn forget_pool(&self, pool: Uuid) {
        for record in self.records.borrow_mut().values_mut() {
            record.pools.remove(&pool);
        }
    }

    /// Forgets a subsystem.
    pub fn forget(&self, nqn: &str) {
        self.records.borrow_mut().remove(nqn);
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
