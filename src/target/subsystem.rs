//! A subsystem: its namespaces, who may use it, where it is reached, and the controllers that hosts hold on it.
//!
//! Everything that changes is behind one mutex, taken by the control thread and by Connect, Identify and log pages, never by
//! an I/O command. Queues learn of namespace changes by the generation: one atomic load per turn.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use uuid::Uuid;

use super::ana::{Access, AnaState, Permit};
use super::controller::{Controller, HostIdentity};
use super::error::TargetError;
use super::namespace::{Namespace, NamespaceMap};
use super::persistent_events::PersistentEvents;
use super::spec::{
    ListenerView, MAX_NAMESPACES_LIMIT, NamespaceSpec, SubsystemKind, SubsystemSpec, SubsystemView,
};
use crate::nvme::fabrics::CNTLID_MAX;
use crate::nvme::nqn::Nqn;

const SERIAL_LEN: usize = 20;
const MODEL_LEN: usize = 40;

pub struct Subsystem {
    pub nqn: Nqn,
    pub kind: SubsystemKind,
    pub serial_number: String,
    pub model_number: String,
    pub max_namespaces: u32,
    min_cntlid: u16,
    max_cntlid: u16,
    /// Hosts are told how each listener reaches the namespaces.
    pub ana_reporting: bool,
    /// What happened to it.
    pub events: PersistentEvents,
    /// Moves with every change of the namespaces, and of how they are reached.
    generation: AtomicU64,
    /// Set once; no controller is admitted any more.
    deleted: AtomicBool,
    state: Mutex<State>,
}

struct State {
    allow_any_host: bool,
    hosts: Vec<Nqn>,
    listeners: Vec<SocketAddr>,
    /// How each listener reaches the namespaces; also of addresses that are yet to be listened on.
    access: BTreeMap<SocketAddr, Arc<Access>>,
    namespaces: Arc<NamespaceMap>,
    /// Removed, but used by commands that still run.
    leaving: Vec<(u32, Weak<Namespace>)>,
    controllers: BTreeMap<u16, Arc<Controller>>,
    next_cntlid: u16,
}

/// Why a host may not have a controller here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdmitError {
    HostNotAllowed,
    /// The connection came in by an address that this subsystem does not listen on.
    WrongListener,
    NoControllerLeft,
    Deleted,
}

impl Subsystem {
    pub(super) fn new(spec: SubsystemSpec) -> Result<Subsystem, TargetError> {
        let nqn = Nqn::new(&spec.nqn).map_err(|source| TargetError::Nqn { nqn: spec.nqn.clone(), source })?;
        if nqn.is_discovery() {
            return Err(TargetError::ReservedNqn);
        }
        check_text("serial_number", &spec.serial_number, SERIAL_LEN)?;
        check_text("model_number", &spec.model_number, MODEL_LEN)?;
        if spec.max_namespaces == 0 || spec.max_namespaces > MAX_NAMESPACES_LIMIT {
            return Err(TargetError::MaxNamespaces { found: spec.max_namespaces, max: MAX_NAMESPACES_LIMIT });
        }
        if spec.min_cntlid == 0 || spec.min_cntlid > spec.max_cntlid || spec.max_cntlid > CNTLID_MAX {
            return Err(TargetError::ControllerIds { min: spec.min_cntlid, max: spec.max_cntlid });
        }
        let serial_number = match spec.serial_number.is_empty() {
            true => serial_of(&nqn),
            false => spec.serial_number,
        };
        Ok(Subsystem::with(nqn, SubsystemKind::Nvme, SubsystemSpec { serial_number, ..spec }))
    }

    /// The discovery subsystem, which every host may use at every listener.
    pub(super) fn discovery() -> Subsystem {
        let nqn = Nqn::discovery();
        let spec = SubsystemSpec {
            allow_any_host: true,
            serial_number: serial_of(&nqn),
            ..SubsystemSpec::new(nqn.as_str())
        };
        Subsystem::with(nqn, SubsystemKind::Discovery, spec)
    }

    fn with(nqn: Nqn, kind: SubsystemKind, spec: SubsystemSpec) -> Subsystem {
        Subsystem {
            nqn,
            kind,
            serial_number: spec.serial_number,
            model_number: spec.model_number,
            max_namespaces: spec.max_namespaces,
            min_cntlid: spec.min_cntlid,
            max_cntlid: spec.max_cntlid,
            ana_reporting: spec.ana_reporting,
            events: PersistentEvents::default(),
            generation: AtomicU64::new(1),
            deleted: AtomicBool::new(false),
            state: Mutex::new(State {
                allow_any_host: spec.allow_any_host,
                hosts: Vec::new(),
                listeners: Vec::new(),
                access: BTreeMap::new(),
                namespaces: Arc::default(),
                leaving: Vec::new(),
                controllers: BTreeMap::new(),
                next_cntlid: spec.min_cntlid,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave the state half changed: every change below is one assignment or one insert.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_discovery(&self) -> bool {
        self.kind == SubsystemKind::Discovery
    }

    // ---- namespaces ------------------------------------------------------------------------------------------------

    /// Moves whenever [`Subsystem::namespaces`] would return something else.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn namespaces(&self) -> Arc<NamespaceMap> {
        Arc::clone(&self.state().namespaces)
    }

    pub(super) fn add_namespace(&self, spec: NamespaceSpec) -> Result<u32, TargetError> {
        let mut state = self.state();
        let max = self.max_namespaces;
        let nsid = spec.nsid.unwrap_or_else(|| state.namespaces.lowest_free());
        if spec.nsid.is_none() && nsid > max {
            return Err(TargetError::NamespacesFull { max, nqn: self.nqn.as_str().into() });
        }
        if nsid == 0 || nsid > max {
            return Err(TargetError::NamespaceId { nsid, max });
        }
        if state.namespaces.get(nsid).is_some() {
            return Err(TargetError::NamespaceIdInUse { nsid, nqn: self.nqn.as_str().into() });
        }
        if let Some(group) = spec.ana_group.filter(|group| !(1..=max).contains(group)) {
            return Err(TargetError::AnaGroup { group, max });
        }
        let namespace = Namespace::new(nsid, spec)?;
        let group = namespace.ana_group;
        for other in state.namespaces.iter() {
            check_identity(&namespace, other)?;
        }
        let mut map = NamespaceMap::clone(&state.namespaces);
        map.insert(Arc::new(namespace));
        self.publish(&mut state, map, nsid, group);
        Ok(nsid)
    }

    /// Takes the namespace away from every queue. The result dies once no command uses it any more.
    pub(super) fn remove_namespace(&self, nsid: u32) -> Result<Weak<Namespace>, TargetError> {
        let mut state = self.state();
        state.leaving.retain(|(_, namespace)| namespace.strong_count() > 0);
        let mut map = NamespaceMap::clone(&state.namespaces);
        let Some(removed) = map.remove(nsid) else {
            // Whoever asks again waits again, while commands run on it.
            let missing = || TargetError::NoNamespace { nsid, nqn: self.nqn.as_str().into() };
            let leaving = state.leaving.iter().rfind(|(left, _)| *left == nsid);
            return leaving.map(|(_, namespace)| namespace.clone()).ok_or_else(missing);
        };
        let group = removed.ana_group;
        let removed = Arc::downgrade(&removed);
        state.leaving.push((nsid, removed.clone()));
        self.publish(&mut state, map, nsid, group);
        Ok(removed)
    }

    /// Namespace `changed` of ANA group `group` came or went.
    fn publish(&self, state: &mut State, map: NamespaceMap, changed: u32, group: u32) {
        state.namespaces = Arc::new(map);
        for access in state.access.values() {
            access.touch(group);
        }
        self.generation.fetch_add(1, Ordering::AcqRel);
        for controller in state.controllers.values() {
            controller.namespaces_changed(&[changed]);
            if self.ana_reporting {
                controller.access_changed();
            }
        }
    }

    /// Tells hosts of the namespaces on the backend with this UUID that have another size now. Returns how many there are.
    /// A namespace may bear a UUID of its own.
    pub(super) fn namespace_resized(&self, uuid: Uuid) -> usize {
        let state = self.state();
        let changed: Vec<u32> = state
            .namespaces
            .iter()
            .filter(|ns| ns.backend.uuid() == uuid && ns.resize())
            .map(|ns| ns.nsid)
            .collect();
        if !changed.is_empty() {
            for controller in state.controllers.values() {
                controller.namespaces_changed(&changed);
            }
        }
        changed.len()
    }

    // ---- hosts and listeners ---------------------------------------------------------------------------------------

    pub fn allows(&self, host: &Nqn) -> bool {
        let state = self.state();
        state.allow_any_host || state.hosts.contains(host)
    }

    pub(super) fn add_host(&self, host: Nqn) -> Result<(), TargetError> {
        let mut state = self.state();
        if state.hosts.contains(&host) {
            return Err(TargetError::HostExists {
                host: host.as_str().into(),
                nqn: self.nqn.as_str().into(),
            });
        }
        state.hosts.push(host);
        Ok(())
    }

    /// Takes the host off the list and returns its controllers, unless any host is allowed.
    pub(super) fn remove_host(&self, host: &Nqn) -> Result<Vec<Arc<Controller>>, TargetError> {
        let mut state = self.state();
        let Some(at) = state.hosts.iter().position(|known| known == host) else {
            return Err(TargetError::NoHost { host: host.as_str().into(), nqn: self.nqn.as_str().into() });
        };
        state.hosts.remove(at);
        Ok(state.unlisted())
    }

    /// Returns the controllers of hosts that are not allowed any more.
    pub(super) fn allow_any_host(&self, allow: bool) -> Vec<Arc<Controller>> {
        let mut state = self.state();
        state.allow_any_host = allow;
        state.unlisted()
    }

    pub fn listens_on(&self, addr: SocketAddr) -> bool {
        self.is_discovery() || self.state().listeners.contains(&addr)
    }

    pub fn listeners(&self) -> Vec<SocketAddr> {
        self.state().listeners.clone()
    }

    pub(super) fn add_listener(&self, addr: SocketAddr) -> bool {
        let mut state = self.state();
        let new = !state.listeners.contains(&addr);
        if new {
            state.listeners.push(addr);
            state.access.entry(addr).or_default();
        }
        new
    }

    /// Takes back a listener whose socket could not be opened. What it was to be like stays.
    pub(super) fn withdraw_listener(&self, addr: SocketAddr) {
        self.state().listeners.retain(|known| *known != addr);
    }

    /// Returns the controllers that came in by this listener, or `None` when there is no such listener.
    pub(super) fn remove_listener(&self, addr: SocketAddr) -> Option<Vec<Arc<Controller>>> {
        let mut state = self.state();
        state.access.remove(&addr);
        let at = state.listeners.iter().position(|known| *known == addr)?;
        state.listeners.remove(at);
        Some(state.controllers.values().filter(|controller| controller.listener == addr).cloned().collect())
    }

    // ---- asymmetric access -----------------------------------------------------------------------------------------

    /// Says how an address will reach a group, or all of them, before it is listened on.
    pub(super) fn prepare_access(
        &self,
        addr: SocketAddr,
        group: Option<u32>,
        to: AnaState,
    ) -> Result<(), TargetError> {
        self.check_group(group)?;
        let mut state = self.state();
        let access = Arc::clone(state.access.entry(addr).or_default());
        self.change_access(&state, &access, group, to);
        Ok(())
    }

    fn change_access(&self, state: &State, access: &Arc<Access>, group: Option<u32>, to: AnaState) {
        if access.set(group, to) {
            // After the change: a queue that sees this finds it made.
            self.generation.fetch_add(1, Ordering::AcqRel);
            let concerned = state.controllers.values().filter(|c| Arc::ptr_eq(&c.access, access));
            concerned.for_each(|controller| controller.access_changed());
        }
    }

    /// Changes how a listener reaches a group, or all of them, and tells the hosts that came in by it. What it returns dies
    /// once no command runs any more that the change forbids.
    pub(super) fn set_access(
        &self,
        addr: SocketAddr,
        group: Option<u32>,
        to: AnaState,
    ) -> Result<Vec<Weak<Permit>>, TargetError> {
        self.check_group(group)?;
        let state = self.state();
        let access = state.access.get(&addr).filter(|_| state.listeners.contains(&addr));
        let access = access.ok_or_else(|| TargetError::NoListener { addr, nqn: self.nqn.as_str().into() })?;
        self.change_access(&state, access, group, to);
        Ok(access.withdrawn(group))
    }

    pub(super) fn check_group(&self, group: Option<u32>) -> Result<(), TargetError> {
        if !self.ana_reporting {
            return Err(TargetError::AnaNotReported { nqn: self.nqn.as_str().into() });
        }
        let max = self.max_namespaces;
        match group {
            Some(group) if !(1..=max).contains(&group) => Err(TargetError::AnaGroup { group, max }),
            _ => Ok(()),
        }
    }

    /// The listeners with the state of every group.
    pub(super) fn listener_views(&self) -> Vec<ListenerView> {
        let state = self.state();
        let groups = if self.ana_reporting { self.max_namespaces } else { 0 };
        let states = |addr| {
            let access = state.access.get(addr);
            (1..=groups).map(|group| access.map_or(AnaState::default(), |access| access.of(group))).collect()
        };
        state.listeners.iter().map(|addr| ListenerView { addr: *addr, ana_states: states(addr) }).collect()
    }

    // ---- controllers -----------------------------------------------------------------------------------------------

    /// Makes a controller for a host, with an id that no live controller of this subsystem has.
    pub(super) fn admit(
        self: &Arc<Self>,
        host: HostIdentity,
        listener: SocketAddr,
        make: impl FnOnce(u16, Arc<Subsystem>, HostIdentity, Arc<Access>) -> Controller,
    ) -> Result<Arc<Controller>, AdmitError> {
        let mut state = self.state();
        if self.deleted.load(Ordering::Relaxed) {
            return Err(AdmitError::Deleted);
        }
        if !self.is_discovery() && !state.listeners.contains(&listener) {
            return Err(AdmitError::WrongListener);
        }
        if !state.allow_any_host && !state.hosts.contains(&host.nqn) {
            return Err(AdmitError::HostNotAllowed);
        }
        let cntlid =
            state.free_cntlid(self.min_cntlid, self.max_cntlid).ok_or(AdmitError::NoControllerLeft)?;
        // Its own until it ends, even if the listener goes and another one comes to the address.
        let access = state.access.get(&listener).cloned().unwrap_or_default();
        let controller = Arc::new(make(cntlid, Arc::clone(self), host, access));
        state.controllers.insert(cntlid, Arc::clone(&controller));
        Ok(controller)
    }

    pub fn controller(&self, cntlid: u16) -> Option<Arc<Controller>> {
        self.state().controllers.get(&cntlid).cloned()
    }

    pub fn controllers(&self) -> Vec<Arc<Controller>> {
        self.state().controllers.values().cloned().collect()
    }

    /// The controller is gone with its last queue; its id may be given out again.
    pub(super) fn forget_controller(&self, cntlid: u16) {
        self.state().controllers.remove(&cntlid);
    }

    /// No controller is admitted any more. Returns those that exist.
    pub(super) fn delete(&self) -> Vec<Arc<Controller>> {
        let state = self.state();
        self.deleted.store(true, Ordering::Relaxed);
        state.controllers.values().cloned().collect()
    }

    pub(super) fn view(&self) -> SubsystemView {
        let state = self.state();
        SubsystemView {
            nqn: self.nqn.as_str().into(),
            kind: self.kind,
            serial_number: self.serial_number.clone(),
            model_number: self.model_number.clone(),
            allow_any_host: state.allow_any_host,
            hosts: state.hosts.iter().map(|host| host.as_str().to_owned()).collect(),
            max_namespaces: self.max_namespaces,
            min_cntlid: self.min_cntlid,
            max_cntlid: self.max_cntlid,
            ana_reporting: self.ana_reporting,
            listeners: state.listeners.clone(),
            namespaces: state.namespaces.iter().map(|ns| ns.view()).collect(),
        }
    }
}

impl State {
    fn unlisted(&self) -> Vec<Arc<Controller>> {
        if self.allow_any_host {
            return Vec::new();
        }
        self.controllers.values().filter(|c| !self.hosts.contains(&c.host.nqn)).cloned().collect()
    }

    /// Ids go round, so that one that was just given up is not met again at once.
    fn free_cntlid(&mut self, min: u16, max: u16) -> Option<u16> {
        let count = usize::from(max - min) + 1;
        if self.controllers.len() >= count {
            return None;
        }
        let mut candidate = self.next_cntlid;
        for _ in 0..=self.controllers.len() {
            let next = if candidate >= max { min } else { candidate + 1 };
            if !self.controllers.contains_key(&candidate) {
                self.next_cntlid = next;
                return Some(candidate);
            }
            candidate = next;
        }
        None
    }
}

fn check_text(field: &'static str, text: &str, max: usize) -> Result<(), TargetError> {
    if text.len() > max {
        return Err(TargetError::TextTooLong { field, len: text.len(), max });
    }
    if !text.bytes().all(|b| (0x20..=0x7E).contains(&b)) {
        return Err(TargetError::TextNotAscii { field });
    }
    Ok(())
}

fn check_identity(new: &Namespace, other: &Namespace) -> Result<(), TargetError> {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02X}")).collect::<String>();
    let nsid = other.nsid;
    if new.uuid == other.uuid {
        return Err(TargetError::DuplicateIdentity { what: "uuid", value: new.uuid.to_string(), nsid });
    }
    if new.nguid == other.nguid {
        return Err(TargetError::DuplicateIdentity { what: "nguid", value: hex(&new.nguid), nsid });
    }
    match (new.eui64, other.eui64) {
        (Some(a), Some(b)) if a == b => {
            Err(TargetError::DuplicateIdentity { what: "eui64", value: hex(&a), nsid })
        }
        _ => Ok(()),
    }
}

/// A serial number that depends on nothing but the NQN: the same after a restart and on another machine.
fn serial_of(nqn: &Nqn) -> String {
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_URL, nqn.as_str().as_bytes());
    let mut serial = uuid.simple().to_string().to_uppercase();
    serial.truncate(SERIAL_LEN);
    serial
}
