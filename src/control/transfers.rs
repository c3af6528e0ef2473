//! Snapshots on their way out of a pool or into it.
//!
//! The control socket carries no data. Whoever sends or receives is shown the snapshot, or the volume that is being
//! received, as the one namespace of a subsystem that nobody else can find: on a port of loopback of its own, under a
//! random NQN, for a random host NQN. The connection to it is also the sign of life: when it ends, or never comes, the
//! transfer ends, and what was received so far is deleted.
//!
//! ```text
//! begin ─► shown ─► host connects ─► … ─► end, or commit ─► hidden
//!            │                        │
//!            └─ nobody came in 10 s ──┴─ the host is gone ─► hidden, what was received is deleted
//! ```
//!
//! What is being sent, and its base, cannot be deleted meanwhile. Nothing here survives a crash; a volume that was being
//! received does, in its pool, and is deleted when that is imported again.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use super::lookup::{Found, pool_error};
use super::methods::nvmf::target_error;
use crate::pool::{Identity, NodeInfo, Pool, ReceiveSpec, Volume, receiving_name};
use crate::target::{Backend, NamespaceSpec, SubsystemSpec, TargetError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// How often it is looked who is gone.
const LOOK: Duration = Duration::from_millis(200);
/// How long a client may take from the answer that it may begin to its connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// When deleting what was left over is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// How many ports are tried. Another program may take one just when it was found free.
const PORT_TRIES: u32 = 16;
/// The namespace that is shown.
pub const NSID: u32 = 1;
/// Its logical blocks: those of the pool, whatever hosts are given otherwise.
const BLOCK_BYTES: u32 = 4096;

/// What is done.
#[derive(Debug, Clone)]
pub enum Task {
    /// A snapshot is read.
    Send {
        /// The snapshot.
        snapshot: Uuid,
        /// The one it is compared with.
        base: Option<Uuid>,
    },
    /// A volume that nobody sees is written.
    Receive {
        /// Who the snapshot will be.
        identity: Identity,
        /// The one that what comes is the difference from.
        base: Option<Uuid>,
    },
}

/// Where a client finds what it is shown.
#[derive(Debug, Clone)]
pub struct Door {
    /// On loopback.
    pub address: SocketAddr,
    /// The subsystem.
    pub nqn: String,
    /// The only host that is let in.
    pub host_nqn: String,
}

/// One transfer.
#[derive(Debug, Clone)]
pub struct Transfer {
    /// Its identity.
    pub session: Uuid,
    /// The pool's name.
    pub pool: String,
    /// The snapshot's name, now or at the end.
    pub name: String,
    /// What is done.
    pub task: Task,
    /// Who does it, in their own words.
    pub by: String,
    /// Seconds since 1970.
    pub started: u64,
    /// Where it is shown.
    pub door: Door,
    begun: Instant,
    connected: bool,
    /// Somebody is ending it.
    ending: bool,
}

/// All transfers under way.
#[derive(Default)]
pub struct Transfers {
    all: RefCell<BTreeMap<Uuid, Transfer>>,
    /// When to look for volumes that were being received when nobody was there to end that.
    strays: Cell<Option<Instant>>,
}

impl Transfers {
    /// The transfer of that identity.
    pub fn get(&self, session: Uuid) -> Result<Transfer, RpcError> {
        let found = self.all.borrow().get(&session).filter(|transfer| !transfer.ending).cloned();
        found.ok_or_else(|| {
            let text = format!("there is no transfer {session}: it has ended, or its client was gone");
            RpcError::refused(libc::ENODEV, text).with("field", "session")
        })
    }

    /// Those under way.
    pub fn list(&self) -> Vec<Transfer> {
        self.all.borrow().values().cloned().collect()
    }

    /// Whether a subsystem is shown for a transfer.
    pub fn has_door(&self, nqn: &str) -> bool {
        self.all.borrow().values().any(|transfer| transfer.door.nqn == nqn)
    }

    /// Those that need this snapshot.
    pub fn needing(&self, pool: &str, node: Uuid) -> Vec<Transfer> {
        let needs = |transfer: &&Transfer| match transfer.task {
            Task::Send { snapshot, base } => snapshot == node || base == Some(node),
            Task::Receive { base, .. } => base == Some(node),
        };
        let all = self.all.borrow();
        all.values().filter(|transfer| transfer.pool == pool).filter(needs).cloned().collect()
    }

    /// Refuses what would end a pool under a transfer.
    pub fn refuse_for(&self, pool: &str) -> Result<(), RpcError> {
        let all = self.all.borrow();
        match all.values().find(|transfer| transfer.pool == pool) {
            None => Ok(()),
            Some(transfer) => {
                let text = format!("in pool {pool}, {}", transfer.told());
                Err(RpcError::refused(libc::EBUSY, text).hint("let it end first, or end it"))
            }
        }
    }

    /// Something may have been left over by an earlier process.
    pub fn expect_strays(&self) {
        self.strays.set(Some(Instant::now()));
    }

    /// Takes the right to end a transfer.
    fn claim(&self, session: Uuid) -> Result<Transfer, RpcError> {
        let transfer = self.get(session)?;
        if let Some(entry) = self.all.borrow_mut().get_mut(&session) {
            entry.ending = true;
        }
        Ok(transfer)
    }

    fn remove(&self, session: Uuid) {
        self.all.borrow_mut().remove(&session);
    }
}

impl Transfer {
    /// What is done and by whom, in words.
    pub fn told(&self) -> String {
        let what = match self.task {
            Task::Send { .. } => "sent",
            Task::Receive { .. } => "received",
        };
        format!("{} is being {what} by {}", self.name, self.by)
    }
}

impl Daemon {
    /// Shows a snapshot to whoever will send it. Called under [`Exports::lock`](super::exports::Exports::lock), as is all
    /// that deletes snapshots.
    pub(super) async fn send_begin(
        &self,
        snapshot: &Found,
        base: Option<&Found>,
        by: &str,
    ) -> Result<Transfer, RpcError> {
        let volume = snapshot.pool.open(&snapshot.id()).await.map_err(|error| snapshot.error(error))?;
        let task = Task::Send { snapshot: snapshot.node.uuid, base: base.map(|base| base.node.uuid) };
        self.begin(Uuid::new_v4(), &snapshot.pool, &snapshot.node.name, task, by, volume).await
    }

    /// Makes a volume that nobody sees, and shows it to whoever will fill it. Called under the same lock, so that the
    /// volume is not taken for one that was left over.
    pub(super) async fn receive_begin(
        &self,
        pool: &Arc<Pool>,
        name: &str,
        spec: ReceiveSpec,
        identity: Identity,
        by: &str,
    ) -> Result<Transfer, RpcError> {
        pool.receive_begin(spec).await.map_err(pool_error)?;
        let begun = async {
            let volume = pool.open(&receiving_name(spec.session)).await.map_err(pool_error)?;
            let task = Task::Receive { identity, base: spec.base };
            self.begin(spec.session, pool, name, task, by, volume).await
        };
        let begun = begun.await;
        if begun.is_err() {
            self.abandon(pool, spec.session).await;
        }
        begun
    }

    async fn begin(
        &self,
        session: Uuid,
        pool: &Pool,
        name: &str,
        task: Task,
        by: &str,
        volume: Volume,
    ) -> Result<Transfer, RpcError> {
        let door = self.show(volume, matches!(task, Task::Send { .. })).await;
        let door = door.map_err(|error| target_error(&error))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let transfer = Transfer {
            session,
            pool: pool.name().to_owned(),
            name: name.to_owned(),
            task,
            by: by.to_owned(),
            started: now.as_secs(),
            door,
            begun: Instant::now(),
            connected: false,
            ending: false,
        };
        tracing::info!(%session, pool = pool.name(), "{}", transfer.told());
        self.transfers.all.borrow_mut().insert(session, transfer.clone());
        Ok(transfer)
    }

    /// Ends a transfer, and deletes what was received. Nothing of it is visible then.
    pub(super) async fn end_transfer(&self, session: Uuid) -> Result<(), RpcError> {
        let transfer = self.transfers.claim(session)?;
        self.hide(&transfer.door).await;
        if let (Task::Receive { .. }, Ok(pool)) = (&transfer.task, self.pools.get(&transfer.pool)) {
            self.abandon(&pool, session).await;
        }
        self.transfers.remove(session);
        Ok(())
    }

    /// Makes what was received a snapshot. When that cannot be done, what was received is deleted.
    pub(super) async fn receive_commit(&self, session: Uuid) -> Result<(Arc<Pool>, NodeInfo), RpcError> {
        let transfer = self.transfers.get(session)?;
        let Task::Receive { identity, .. } = transfer.task else {
            return Err(RpcError::field("session", "is that of a snapshot being sent"));
        };
        let pool = self.pool_named(&transfer.pool)?;
        self.transfers.claim(session)?;
        // Whatever else that host sends, it comes too late.
        self.hide(&transfer.door).await;
        let ended = pool.receive_end(session, &transfer.name, identity).await;
        if ended.is_err() {
            self.abandon(&pool, session).await;
        }
        self.transfers.remove(session);
        let node = ended.map_err(pool_error)?;
        tracing::info!(%session, pool = pool.name(), "{} was received", node.name);
        Ok((pool, node))
    }

    /// Ends all transfers of a pool, or all there are.
    pub(super) async fn end_transfers(&self, pool: Option<&str>) {
        for transfer in self.transfers.list() {
            if pool.is_none_or(|pool| transfer.pool == pool) {
                // One that somebody else is just ending needs nobody else.
                drop(self.end_transfer(transfer.session).await);
            }
        }
    }

    async fn abandon(&self, pool: &Pool, session: Uuid) {
        if let Err(error) = pool.receive_abandon(session).await {
            tracing::warn!(%session, pool = pool.name(), %error, "what was received stays for now");
            self.transfers.strays.set(Some(Instant::now() + RETRY));
        }
    }

    /// Shows a volume to one client.
    async fn show(&self, volume: Volume, read_only: bool) -> Result<Door, TargetError> {
        let name = || format!("nqn.2014-08.org.nvmexpress:uuid:{}", Uuid::new_v4());
        let (nqn, host_nqn) = (name(), name());
        self.target.create_subsystem(SubsystemSpec { max_namespaces: 1, ..SubsystemSpec::new(&nqn) })?;
        let shown = async {
            self.target.add_host(&nqn, &host_nqn)?;
            let spec = NamespaceSpec::new(Backend::Volume(volume), "transfer");
            let spec = NamespaceSpec { nsid: Some(NSID), block_size: BLOCK_BYTES, read_only, ..spec };
            self.target.add_namespace(&nqn, spec)?;
            self.open_door(&nqn).await
        };
        match shown.await {
            Ok(address) => Ok(Door { address, nqn, host_nqn }),
            Err(error) => {
                drop(self.target.delete_subsystem(&nqn).await);
                Err(error)
            }
        }
    }

    async fn open_door(&self, nqn: &str) -> Result<SocketAddr, TargetError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let free = TcpListener::bind(any).and_then(|socket| socket.local_addr());
            let address = free.map_err(|source| TargetError::Listen { addr: any, source })?;
            match self.target.add_listener(nqn, address).await {
                Ok(()) => return Ok(address),
                Err(error) if tries == PORT_TRIES => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Takes away what a client was shown. Its volume is nobody's then.
    async fn hide(&self, door: &Door) {
        // The listener first: an address whose last subsystem is deleted would stay open for a while.
        let mut done = self.target.remove_listener(&door.nqn, door.address).await;
        done = done.and(self.target.remove_namespace(&door.nqn, NSID).await);
        done = done.and(self.target.delete_subsystem(&door.nqn).await);
        if let Err(error) = done {
            tracing::warn!(%error, "a transfer did not go in peace");
        }
    }

    /// Ends transfers whose client is gone, and deletes what earlier processes left over; for ever.
    pub(super) async fn look_after_transfers(&self) {
        loop {
            tokio::time::sleep(LOOK).await;
            for transfer in self.left_alone() {
                tracing::warn!(session = %transfer.session, "{}, who is gone: ended", transfer.told());
                drop(self.end_transfer(transfer.session).await);
            }
            if self.transfers.strays.get().is_some_and(|due| due <= Instant::now()) {
                self.clear_strays().await;
            }
        }
    }

    /// Transfers whose client was connected and is no more, or did not come in time.
    fn left_alone(&self) -> Vec<Transfer> {
        let mut alone = Vec::new();
        for transfer in self.transfers.all.borrow_mut().values_mut().filter(|transfer| !transfer.ending) {
            if self.target.controllers(&transfer.door.nqn).is_ok_and(|hosts| !hosts.is_empty()) {
                transfer.connected = true;
            } else if transfer.connected || transfer.begun.elapsed() > CONNECT_LIMIT {
                alone.push(transfer.clone());
            }
        }
        alone
    }

    async fn clear_strays(&self) {
        self.transfers.strays.set(None);
        // Under the lock none is just beginning.
        let _changing = self.exports.lock().await;
        for pool in self.pools.list() {
            // A pool that is just leaving is looked through when it comes back.
            let Ok(sessions) = pool.receiving().await else { continue };
            for session in sessions {
                if !self.transfers.all.borrow().contains_key(&session) {
                    tracing::info!(%session, pool = pool.name(), "a snapshot was not received whole: deleted");
                    self.abandon(&pool, session).await;
                }
            }
        }
    }
}
