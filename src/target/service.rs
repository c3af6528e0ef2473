//! [`Target`]: the target as its operator sees it, and what all connections share.
//!
//! Every call comes from the control thread. A call changes what is shared, tells the connections concerned, and, where it
//! takes something away, waits until nothing uses it any more. That wait is bounded, and a caller in whose time it did not
//! end is told so: what runs on a backend may take as long as its device does.
#![forbid(unsafe_code)]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::ana::AnaState;
use super::complaints::Complaints;
use super::controller::Controller;
use super::error::TargetError;
use super::inbox::CloseReason;
use super::listener::Listener;
use super::share::Shares;
use super::spec::{
    ControllerView, ListenerView, NamespaceSpec, QueueView, Referral, SubsystemSpec, SubsystemView,
    TransportOptions,
};
use super::subsystem::Subsystem;
use crate::nvme::nqn::Nqn;
use crate::reactor::{self, ReactorHandle};

/// How long the operator's calls wait for what they took away to be unused.
const RELEASE_LIMIT: Duration = Duration::from_secs(12);
const RELEASE_POLL: Duration = Duration::from_millis(1);

/// An NVMe/TCP target. Cheap to clone.
#[derive(Clone)]
pub struct Target {
    shared: Arc<Shared>,
}

/// What every connection of a target can reach.
pub struct Shared {
    pub reactors: Vec<ReactorHandle>,
    pub discovery: Arc<Subsystem>,
    registry: Mutex<Registry>,
    /// What the I/O queues have of the memory for data.
    pub shares: Arc<Shares>,
    pub complaints: Complaints,
    discovery_generation: AtomicU64,
    connections: AtomicU32,
    next_reactor: AtomicUsize,
    epoch: Instant,
}

struct Registry {
    options: Arc<TransportOptions>,
    subsystems: BTreeMap<Nqn, Arc<Subsystem>>,
    listeners: BTreeMap<SocketAddr, Arc<Listener>>,
    /// Addresses that are open only to send hosts away, and until when.
    farewells: BTreeMap<SocketAddr, Instant>,
    /// Other discovery services that hosts are told of, as they were added.
    referrals: Vec<Referral>,
    /// Subsystems that are away and will be back: hosts may go on asking for them.
    away: BTreeSet<Nqn>,
}

impl Registry {
    /// Whether no subsystem is reached at `addr`.
    fn is_unused(&self, shared: &Shared, addr: SocketAddr) -> bool {
        let mut all = self.subsystems.values().chain([&shared.discovery]);
        !all.any(|subsystem| subsystem.listeners().contains(&addr))
    }
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn options(&self) -> Arc<TransportOptions> {
        Arc::clone(&self.registry().options)
    }

    /// Milliseconds since the target was made.
    pub fn now_ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_millis() as u64
    }

    /// The moment [`Shared::now_ms`] reaches `ms`.
    pub fn instant_of(&self, ms: u64) -> Instant {
        self.epoch + Duration::from_millis(ms)
    }

    /// The subsystem a host asks for by name, discovery included.
    pub fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        if nqn.is_discovery() {
            return Some(Arc::clone(&self.discovery));
        }
        self.registry().subsystems.get(nqn).cloned()
    }

    /// Whether a subsystem that is not here, or is just going, will be back.
    pub fn is_away(&self, nqn: &Nqn) -> bool {
        self.registry().away.contains(nqn)
    }

    /// All subsystems but discovery, by NQN.
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.registry().subsystems.values().cloned().collect()
    }

    pub fn referrals(&self) -> Vec<Referral> {
        self.registry().referrals.clone()
    }

    /// GENCTR of the discovery log: moves with everything that can change an entry.
    pub fn discovery_generation(&self) -> u64 {
        self.discovery_generation.load(Ordering::Acquire)
    }

    fn discovery_changed(&self) {
        self.discovery_generation.fetch_add(1, Ordering::AcqRel);
        for controller in self.discovery.controllers() {
            controller.nudge();
        }
    }

    /// The reactor for the next connection.
    pub fn next_reactor(&self) -> &ReactorHandle {
        let turn = self.next_reactor.fetch_add(1, Ordering::Relaxed);
        &self.reactors[turn % self.reactors.len()]
    }

    /// Counts a connection in, unless there are as many as the options allow.
    pub fn connection_opened(&self) -> bool {
        let max = self.registry().options.max_connections;
        let counted = self.connections.fetch_add(1, Ordering::Relaxed) < max;
        if !counted {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        }
        counted
    }

    pub fn connection_closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Target {
    /// A target whose connections live on `reactors`; it listens nowhere yet.
    pub fn new(reactors: Vec<ReactorHandle>) -> Target {
        Target {
            shared: Arc::new(Shared {
                reactors,
                discovery: Arc::new(Subsystem::discovery()),
                registry: Mutex::new(Registry {
                    options: Arc::default(),
                    subsystems: BTreeMap::new(),
                    listeners: BTreeMap::new(),
                    farewells: BTreeMap::new(),
                    referrals: Vec::new(),
                    away: BTreeSet::new(),
                }),
                shares: Arc::default(),
                complaints: Complaints::default(),
                // Not 0, which hosts may take for "never filled".
                discovery_generation: AtomicU64::new(1),
                connections: AtomicU32::new(0),
                next_reactor: AtomicUsize::new(0),
                epoch: Instant::now(),
            }),
        }
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The limits of connections made from now on.
    pub fn transport(&self) -> TransportOptions {
        TransportOptions::clone(&self.shared.options())
    }

    pub fn set_transport(&self, options: TransportOptions) -> Result<(), TargetError> {
        options.check()?;
        self.shared.registry().options = Arc::new(options);
        Ok(())
    }

    /// TCP connections that are open now.
    pub fn connection_count(&self) -> u32 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// Memory that hosts' commands hold now, bytes: data on its way in either direction.
    pub fn bytes_held(&self) -> usize {
        self.shared.shares.held()
    }

    // ---- subsystems ------------------------------------------------------------------------------------------------

    pub fn create_subsystem(&self, spec: SubsystemSpec) -> Result<(), TargetError> {
        let subsystem = Subsystem::new(spec)?;
        let mut registry = self.shared.registry();
        if registry.subsystems.contains_key(&subsystem.nqn) {
            return Err(TargetError::SubsystemExists { nqn: subsystem.nqn.as_str().into() });
        }
        if let Some(other) = registry.subsystems.values().find(|s| s.serial_number == subsystem.serial_number)
        {
            return Err(TargetError::SerialInUse {
                serial: subsystem.serial_number.clone(),
                nqn: other.nqn.as_str().into(),
            });
        }
        registry.away.remove(&subsystem.nqn);
        registry.subsystems.insert(subsystem.nqn.clone(), Arc::new(subsystem));
        Ok(())
    }

    /// Deletes a subsystem. Its hosts are disconnected; those that come back are told not to retry, for [`TransportOptions::farewell`] also
    /// where nothing else is reached at the address. Returns when its last command has ended.
    pub async fn delete_subsystem(&self, nqn: &str) -> Result<(), TargetError> {
        self.end_subsystem(nqn, false).await
    }

    /// Takes a subsystem away that will be back: it leaves as one that is deleted does, but hosts may retry until then.
    pub async fn withdraw_subsystem(&self, nqn: &str) -> Result<(), TargetError> {
        self.end_subsystem(nqn, true).await
    }

    async fn end_subsystem(&self, nqn: &str, returns: bool) -> Result<(), TargetError> {
        let subsystem = self.find_nvme(nqn)?;
        if returns {
            // First, so that no host is sent away for good.
            self.shared.registry().away.insert(subsystem.nqn.clone());
        }
        for controller in subsystem.delete() {
            controller.disconnect(CloseReason::Administrative);
        }
        for addr in subsystem.listeners() {
            subsystem.remove_listener(addr);
            match returns {
                true => self.close_unused_listener(addr).await,
                false => self.close_after_farewell(addr),
            }
        }
        if !self.released(|| subsystem.controllers().is_empty()).await {
            return Err(TargetError::StillInUse { what: format!("subsystem {nqn}") });
        }
        self.shared.registry().subsystems.remove(&subsystem.nqn);
        self.shared.discovery_changed();
        Ok(())
    }

    /// Discovery goes on to answer as well meanwhile: whoever asks it finds that nothing is here.
    fn close_after_farewell(&self, addr: SocketAddr) {
        let until = Instant::now() + self.shared.options().farewell;
        let mut registry = self.shared.registry();
        if !registry.listeners.contains_key(&addr) || !registry.is_unused(&self.shared, addr) {
            return;
        }
        // Whoever began to wait before waits for this too.
        if registry.farewells.insert(addr, until).is_some() {
            return;
        }
        let Some(reactor) = self.shared.reactors.first() else { return };
        let shared = Arc::downgrade(&self.shared);
        reactor.spawn(move || async move {
            let mut until = until;
            loop {
                reactor::sleep_until(until).await;
                let Some(shared) = shared.upgrade() else { return };
                let agreed = shared.registry().farewells.get(&addr).copied();
                match agreed {
                    Some(later) if later > until => until = later,
                    Some(_) => {
                        return Target { shared: Arc::clone(&shared) }.close_unused_listener(addr).await;
                    }
                    // It was closed, or is used again.
                    None => return,
                }
            }
        });
    }

    /// Discovery first, then by NQN.
    pub fn subsystems(&self) -> Vec<SubsystemView> {
        let mut views = vec![self.shared.discovery.view()];
        views.extend(self.shared.subsystems().iter().map(|subsystem| subsystem.view()));
        views
    }

    pub fn subsystem(&self, nqn: &str) -> Result<SubsystemView, TargetError> {
        Ok(self.find(nqn)?.view())
    }

    pub fn controllers(&self, nqn: &str) -> Result<Vec<ControllerView>, TargetError> {
        Ok(self.find(nqn)?.controllers().iter().map(|controller| controller.view()).collect())
    }

    /// The queues of all controllers, admin queues included.
    pub fn queues(&self, nqn: &str) -> Result<Vec<QueueView>, TargetError> {
        Ok(self.find(nqn)?.controllers().iter().flat_map(|controller| controller.queue_views()).collect())
    }

    // ---- namespaces ------------------------------------------------------------------------------------------------

    /// Returns the NSID.
    pub fn add_namespace(&self, nqn: &str, spec: NamespaceSpec) -> Result<u32, TargetError> {
        let subsystem = self.find_nvme(nqn)?;
        let nsid = subsystem.add_namespace(spec)?;
        let namespace = subsystem.namespaces().get(nsid).cloned();
        subsystem.events.record_namespace(nsid, namespace.as_deref(), self.shared.now_ms(Instant::now()));
        Ok(nsid)
    }

    /// Removes a namespace under whatever runs on it: commands that have started are completed, later ones find no
    /// namespace. Returns when nothing of the target uses its backend any more.
    pub async fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        let subsystem = self.find_nvme(nqn)?;
        let was_there = subsystem.namespaces().get(nsid).is_some();
        let removed = subsystem.remove_namespace(nsid)?;
        if was_there {
            subsystem.events.record_namespace(nsid, None, self.shared.now_ms(Instant::now()));
        }
        match self.released(|| removed.strong_count() == 0).await {
            true => Ok(()),
            false => Err(TargetError::StillInUse { what: format!("namespace {nsid} of {nqn}") }),
        }
    }

    /// The backend with this UUID has another size now: hosts are told. Returns how many namespaces it concerned.
    pub fn namespace_resized(&self, uuid: Uuid) -> usize {
        self.shared.subsystems().iter().map(|subsystem| subsystem.namespace_resized(uuid)).sum()
    }

    // ---- hosts -----------------------------------------------------------------------------------------------------

    pub fn add_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        self.find_nvme(nqn)?.add_host(parse(host)?)?;
        self.shared.discovery_changed();
        Ok(())
    }

    /// Takes a host off the list. Unless any host is allowed its controllers are cut at once; returns when they are gone.
    pub async fn remove_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        let cut = self.find_nvme(nqn)?.remove_host(&parse(host)?)?;
        self.shared.discovery_changed();
        self.disconnect(cut).await;
        Ok(())
    }

    /// Switching it off cuts every host that is not in the list.
    pub async fn allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), TargetError> {
        let cut = self.find_nvme(nqn)?.allow_any_host(allow);
        self.shared.discovery_changed();
        self.disconnect(cut).await;
        Ok(())
    }

    // ---- listeners -------------------------------------------------------------------------------------------------

    /// Makes the subsystem reachable at `addr`; a wildcard address means every address of this machine.
    pub async fn add_listener(&self, nqn: &str, addr: SocketAddr) -> Result<(), TargetError> {
        let subsystem = self.find(nqn)?;
        if !subsystem.add_listener(addr) {
            return Err(TargetError::ListenerExists { addr, nqn: nqn.into() });
        }
        self.open_socket(&subsystem, addr).await
    }

    /// As [`Target::add_listener`] for several at once, and returns those that failed. No socket opens before every
    /// subsystem knows where it is reached, so that no host is sent away that is merely early.
    pub async fn add_listeners(&self, wanted: Vec<(String, SocketAddr)>) -> Vec<(String, TargetError)> {
        let mut failed = Vec::new();
        let mut added = Vec::new();
        for (nqn, addr) in wanted {
            match self.find(&nqn) {
                Ok(subsystem) if subsystem.add_listener(addr) => added.push((nqn, subsystem, addr)),
                Ok(_) => {}
                Err(error) => failed.push((nqn, error)),
            }
        }
        for (nqn, subsystem, addr) in added {
            if let Err(error) = self.open_socket(&subsystem, addr).await {
                failed.push((nqn, error));
            }
        }
        failed
    }

    /// Opens the socket of a listener that the subsystem has already, if it is not open; takes the listener back when
    /// that fails.
    async fn open_socket(&self, subsystem: &Subsystem, addr: SocketAddr) -> Result<(), TargetError> {
        let is_open = || self.shared.registry().listeners.contains_key(&addr);
        self.shared.registry().farewells.remove(&addr);
        // Another call may open it meanwhile. The registry is not locked while this one waits for the address.
        let opened = Listener::bind(addr, &self.shared, is_open).await;
        let outcome =
            opened.and_then(|socket| match (socket, self.shared.registry().listeners.entry(addr)) {
                (Some(socket), Entry::Vacant(vacant)) => {
                    vacant.insert(Listener::open(addr, socket, &self.shared)?);
                    Ok(())
                }
                _ => Ok(()),
            });
        if outcome.is_err() {
            subsystem.withdraw_listener(addr);
        }
        self.shared.discovery_changed();
        outcome
    }

    /// The subsystem is not reached at `addr` any more: hosts that came in by it are disconnected.
    pub async fn remove_listener(&self, nqn: &str, addr: SocketAddr) -> Result<(), TargetError> {
        let cut = self
            .find(nqn)?
            .remove_listener(addr)
            .ok_or_else(|| TargetError::NoListener { addr, nqn: nqn.into() })?;
        self.shared.discovery_changed();
        self.close_unused_listener(addr).await;
        self.disconnect(cut).await;
        Ok(())
    }

    /// Says how an address will reach a subsystem's namespaces once it is listened on: one ANA group, or all.
    pub fn prepare_ana_state(
        &self,
        nqn: &str,
        addr: SocketAddr,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<(), TargetError> {
        self.find_nvme(nqn)?.prepare_access(addr, group, state)
    }

    /// Whether a subsystem reports how it is reached, and has such an ANA group.
    pub fn check_ana_group(&self, nqn: &str, group: Option<u32>) -> Result<(), TargetError> {
        self.find_nvme(nqn)?.check_group(group)
    }

    /// Changes how a listener reaches one ANA group, or all of them. Returns when every command has ended that must not run
    /// any more: from then on nothing that came in by this listener changes the group's namespaces.
    pub async fn set_ana_state(
        &self,
        nqn: &str,
        addr: SocketAddr,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<(), TargetError> {
        let withdrawn = self.find_nvme(nqn)?.set_access(addr, group, state)?;
        match self.released(|| withdrawn.iter().all(|permit| permit.strong_count() == 0)).await {
            true => Ok(()),
            false => Err(TargetError::StillInUse { what: format!("that way to {nqn}") }),
        }
    }

    /// The addresses that accept connections for subsystems now; discovery answers at each of them.
    pub fn open_addresses(&self) -> Vec<SocketAddr> {
        let registry = self.shared.registry();
        let farewells = &registry.farewells;
        registry.listeners.keys().filter(|addr| !farewells.contains_key(addr)).copied().collect()
    }

    /// The listeners of a subsystem and how they reach its namespaces.
    pub fn listeners(&self, nqn: &str) -> Result<Vec<ListenerView>, TargetError> {
        Ok(self.find(nqn)?.listener_views())
    }

    // ---- referrals -------------------------------------------------------------------------------------------------

    /// Tells hosts that ask for subsystems of another place to ask. One that is known already is replaced.
    pub fn add_referral(&self, referral: Referral) -> Result<(), TargetError> {
        parse(&referral.nqn)?;
        let mut registry = self.shared.registry();
        if registry.referrals.contains(&referral) {
            return Ok(());
        }
        registry.referrals.retain(|known| (known.addr, &known.nqn) != (referral.addr, &referral.nqn));
        registry.referrals.push(referral);
        drop(registry);
        self.shared.discovery_changed();
        Ok(())
    }

    /// False if there is no such referral.
    pub fn remove_referral(&self, addr: SocketAddr, nqn: &str) -> bool {
        let mut registry = self.shared.registry();
        let before = registry.referrals.len();
        registry.referrals.retain(|known| (known.addr, known.nqn.as_str()) != (addr, nqn));
        let is_removed = registry.referrals.len() < before;
        drop(registry);
        if is_removed {
            self.shared.discovery_changed();
        }
        is_removed
    }

    /// As they were added.
    pub fn referrals(&self) -> Vec<Referral> {
        self.shared.referrals()
    }

    /// Stops listening and disconnects every host. The target can be used again afterwards.
    pub async fn shutdown(&self) {
        let listeners = {
            let mut registry = self.shared.registry();
            registry.farewells.clear();
            std::mem::take(&mut registry.listeners)
        };
        for listener in listeners.values() {
            listener.close(&self.shared).await;
        }
        let mut controllers = self.shared.discovery.controllers();
        for subsystem in self.shared.subsystems() {
            for addr in subsystem.listeners() {
                subsystem.remove_listener(addr);
            }
            controllers.extend(subsystem.controllers());
        }
        self.disconnect(controllers).await;
    }

    // ---- helpers ---------------------------------------------------------------------------------------------------

    fn find(&self, nqn: &str) -> Result<Arc<Subsystem>, TargetError> {
        let missing = || TargetError::NoSubsystem { nqn: nqn.into() };
        let nqn = Nqn::new(nqn).map_err(|_| missing())?;
        self.shared.subsystem(&nqn).ok_or_else(missing)
    }

    fn find_nvme(&self, nqn: &str) -> Result<Arc<Subsystem>, TargetError> {
        let subsystem = self.find(nqn)?;
        if subsystem.is_discovery() { Err(TargetError::ReservedNqn) } else { Ok(subsystem) }
    }

    async fn close_unused_listener(&self, addr: SocketAddr) {
        let closed = {
            let mut registry = self.shared.registry();
            registry.farewells.remove(&addr);
            match registry.is_unused(&self.shared, addr) {
                true => registry.listeners.remove(&addr),
                false => None,
            }
        };
        if let Some(listener) = closed {
            listener.close(&self.shared).await;
        }
    }

    async fn disconnect(&self, controllers: Vec<Arc<Controller>>) {
        for controller in &controllers {
            controller.disconnect(CloseReason::Administrative);
        }
        self.released(|| {
            controllers
                .iter()
                .all(|c| c.subsystem.controller(c.cntlid).is_none_or(|now| !Arc::ptr_eq(&now, c)))
        })
        .await;
    }

    /// Waits until `done`, for [`RELEASE_LIMIT`] at most. False if it is not.
    async fn released(&self, done: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + RELEASE_LIMIT;
        while !done() {
            if Instant::now() >= deadline {
                return false;
            }
            // Slept on a reactor, so that the caller may run on any executor. A reactor that is gone has no connections.
            if self.shared.next_reactor().call(|| reactor::sleep(RELEASE_POLL)).await.is_err() {
                return true;
            }
        }
        true
    }
}

fn parse(host: &str) -> Result<Nqn, TargetError> {
    Nqn::new(host).map_err(|source| TargetError::Nqn { nqn: host.into(), source })
}
