//! How the exports of a pool come back with it, and go with it.
//!
//! Nothing listens before everything is there: a host must not find a subsystem without its namespaces. What cannot
//! be brought back is said, and stays recorded. An address that cannot be listened on is tried again and again: what
//! holds it may go away.
#![forbid(unsafe_code)]

use super::Daemon;
use super::changes::{KEY_PREFIX, Leaving};
use super::exports::{NamespaceRecord, Place, Record};
use crate::nvme::nqn::DISCOVERY;
use crate::pool::Pool;
use crate::target::{AnaState, Backend};
use std::net::SocketAddr;
use std::time::Duration;
use uuid::Uuid;

/// How often listeners that could not be opened are tried again.
const LISTEN_AGAIN: Duration = Duration::from_secs(2);

/// Each but the last is called under [`Exports::lock`](super::exports::Exports::lock), or before anyone can call.
impl Daemon {
    /// Brings back what a pool's records name, except that nothing listens yet. Gives what could not be brought back.
    pub(super) async fn restore_exports(&self, pool_name: &str) -> Vec<String> {
        let Ok(pool) = self.pools.get(pool_name) else { return Vec::new() };
        self.agree_on_transport(&pool).await;
        self.agree_on_discovery(&pool).await;
        self.read_deletions(&pool).await;
        let mut warnings = Vec::new();
        let stored = pool.config_list(KEY_PREFIX).await.unwrap_or_else(|error| {
            warnings.push(format!("the recorded exports cannot be read: {error}"));
            Vec::new()
        });
        for (key, value) in stored {
            match serde_json::from_value::<Record>(value) {
                Ok(mut record) => {
                    if record.id.is_nil() {
                        record.id = Uuid::new_v5(&Uuid::NAMESPACE_URL, record.nqn.as_bytes());
                    }
                    self.restore_subsystem(&pool, record, &mut warnings).await;
                }
                Err(error) => warnings.push(format!("the record {key} cannot be read: {error}")),
            }
        }
        for warning in &warnings {
            tracing::error!(pool = pool_name, "{warning}");
        }
        warnings
    }

    async fn restore_subsystem(&self, home: &Pool, stored: Record, warnings: &mut Vec<String>) {
        if self.bury(home, &stored).await {
            return;
        }
        let nqn = stored.nqn.clone();
        let known = self.exports.get(&nqn);
        let mut record = match known.clone() {
            Some(known) => known,
            None => {
                if let Err(error) = self.target.create_subsystem(stored.spec()) {
                    warnings.push(format!("subsystem {nqn} cannot be brought back: {error}"));
                    return;
                }
                let stored = stored.clone();
                Record {
                    namespaces: Vec::new(),
                    hosts: Vec::new(),
                    listeners: Vec::new(),
                    access: Vec::new(),
                    ..stored
                }
            }
        };
        record.homes.insert(home.name().to_owned());
        record.pools.extend(stored.pools.iter().copied().chain([home.uuid()]));
        let (before, stored_generation) = (record.generation, stored.generation);
        if stored_generation >= before {
            self.adopt(&mut record, &stored, warnings).await;
        }
        for mut namespace in stored.namespaces {
            if let Place::Node { pool, .. } = &mut namespace.place {
                *pool = home.name().to_owned();
            }
            if record.namespaces.contains(&namespace) {
                continue;
            }
            match self.restore_namespace(home, &nqn, &namespace).await {
                Ok(()) => record.namespaces.push(namespace),
                Err(error) => {
                    let nsid = namespace.nsid;
                    warnings.push(format!("namespace {nsid} of {nqn} cannot be brought back: {error}"));
                    record.unresolved.push(namespace);
                }
            }
        }
        record.namespaces.sort_by_key(|namespace| namespace.nsid);
        let differ = known.is_some() && before != stored_generation;
        self.exports.set(record.clone());
        // The older of two records must not be taken for the truth when its pool comes back without the other.
        if differ && let Err(error) = self.keep(record).await {
            tracing::error!(nqn, ?error, "the records of a subsystem cannot be brought in line");
        }
    }

    /// Takes over from a record that is at least as new who may connect, and where.
    async fn adopt(&self, record: &mut Record, stored: &Record, warnings: &mut Vec<String>) {
        let nqn = &stored.nqn;
        if stored.generation > record.generation && record.generation > 0 {
            for host in record.hosts.extract_if(.., |host| !stored.hosts.contains(host)) {
                drop(self.target.remove_host(nqn, &host).await);
            }
            for address in record.listeners.extract_if(.., |address| !stored.listeners.contains(address)) {
                drop(self.target.remove_listener(nqn, address).await);
            }
        }
        for host in &stored.hosts {
            if record.hosts.contains(host) {
                continue;
            }
            if let Err(error) = self.target.add_host(nqn, host) {
                warnings.push(format!("host {host} cannot be allowed to connect to {nqn}: {error}"));
            }
            record.hosts.push(host.clone());
        }
        if stored.generation > record.generation {
            if record.allow_any_host != stored.allow_any_host {
                drop(self.target.allow_any_host(nqn, stored.allow_any_host).await);
            }
            record.allow_any_host = stored.allow_any_host;
            record.generation = stored.generation;
        }
        if stored.ana_reporting && record.access != stored.access {
            // Those of which nothing is said any more are as usual.
            let usual = record.access.iter().map(|known| (known.address, None, AnaState::Optimized));
            let wanted = stored.access.iter().filter_map(|wanted| {
                Some((wanted.address, wanted.anagrpid, AnaState::from_name(&wanted.ana_state)?))
            });
            for (address, group, state) in usual.chain(wanted) {
                if let Err(error) = self.target.prepare_ana_state(nqn, address, group, state) {
                    warnings.push(format!("{nqn} at {address} cannot be {}: {error}", state.name()));
                }
            }
            record.access.clone_from(&stored.access);
        }
        let new = stored.listeners.iter().filter(|address| !record.listeners.contains(address));
        record.listeners.extend(new.copied().collect::<Vec<SocketAddr>>());
    }

    async fn restore_namespace(
        &self,
        home: &Pool,
        nqn: &str,
        wanted: &NamespaceRecord,
    ) -> Result<(), String> {
        let Place::Node { uuid, .. } = &wanted.place else { return Ok(()) };
        let volume = home.open(&uuid.to_string()).await.map_err(|error| error.text)?;
        let spec = wanted.spec(Backend::Volume(volume), uuid.to_string());
        self.target.add_namespace(nqn, spec).map(drop).map_err(|error| error.to_string())
    }

    /// The recorded addresses on which nothing listens.
    pub(super) fn closed_listeners(&self) -> Vec<(String, SocketAddr)> {
        let mut closed = Vec::new();
        for record in self.exports.all() {
            let open = self.target.subsystem(&record.nqn).map(|view| view.listeners).unwrap_or_default();
            let missing = record.listeners.iter().filter(|address| !open.contains(address));
            closed.extend(missing.map(|address| (record.nqn.clone(), *address)));
        }
        closed.extend(self.closed_discovery_listeners());
        closed
    }

    /// Opens the recorded listeners that are not open.
    pub(super) async fn open_listeners(&self) {
        for (nqn, error) in self.target.add_listeners(self.closed_listeners()).await {
            tracing::error!(nqn, %error, "a recorded listener cannot be opened yet");
        }
    }

    /// Takes the exports of a pool out of the target, and leaves their records in the pool.
    pub(super) async fn withdraw_exports(&self, pool: &str) -> Vec<Leaving> {
        let mut leaving = Vec::new();
        for mut record in self.exports.all() {
            if !record.homes.remove(pool) {
                continue;
            }
            let nqn = record.nqn.clone();
            let elsewhere = |namespace: &NamespaceRecord| namespace.place.pool() != Some(pool);
            if record.homes.is_empty() && !record.namespaces.iter().any(elsewhere) {
                self.exports.forget(&nqn);
                let target = self.target.clone();
                leaving.push(Leaving::begin(async move { target.withdraw_subsystem(&nqn).await }).await);
                continue;
            }
            for namespace in record.namespaces.extract_if(.., |namespace| !elsewhere(namespace)) {
                let (target, nqn) = (self.target.clone(), nqn.clone());
                let gone = async move { target.remove_namespace(&nqn, namespace.nsid).await };
                leaving.push(Leaving::begin(gone).await);
            }
            record.unresolved.retain(elsewhere);
            self.exports.set(record);
        }
        leaving
    }

    /// Lets the subsystems live on that had a record in a pool which is gone.
    pub(super) fn forget_home(&self, pool: &str) {
        for mut record in self.exports.all() {
            if record.homes.remove(pool) {
                self.exports.set(record);
            }
        }
    }

    /// The subsystem that shows something of this pool and to which hosts are connected.
    pub(super) fn connected_subsystem(&self, pool: &str) -> Option<String> {
        let subsystems = self.exports.of_pool(pool).into_iter().map(|(nqn, _)| nqn);
        let connected = |nqn: &String| self.target.controllers(nqn).is_ok_and(|hosts| !hosts.is_empty());
        subsystems.into_iter().find(connected)
    }

    /// Tries to open what is recorded and does not listen, for ever.
    pub(super) async fn keep_listening(&self) {
        loop {
            tokio::time::sleep(LISTEN_AGAIN).await;
            for (nqn, address) in self.closed_listeners() {
                // Without the lock, since an address may be waited for.
                if self.target.add_listener(&nqn, address).await.is_err() {
                    continue;
                }
                tracing::info!(nqn, %address, "a recorded listener is open at last");
                if self.record(&nqn).is_ok_and(|record| !record.listeners.contains(&address))
                    || (nqn == DISCOVERY && !self.discovery_listeners().contains(&address))
                {
                    drop(self.target.remove_listener(&nqn, address).await);
                }
            }
        }
    }
}
