//! What callers call things, looked up: pools, nodes and bdevs by name, and what a pool refuses in an answer's form.
#![forbid(unsafe_code)]

use super::Daemon;
use super::error::RpcError;
use super::exports::{Addition, Place};
use super::names;
use crate::nearest::nearest;
use crate::pool::{NodeInfo, NodeKind, Pool, PoolError, PoolErrorKind};
use crate::target::Backend;
use std::sync::Arc;
use uuid::Uuid;

const NO_POOL: &str =
    "no pool is imported: `rimrock pool create` makes one, `rimrock pool import` brings one back";

/// A node and the pool it lies in.
pub struct Found {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The node.
    pub node: NodeInfo,
}

impl Found {
    /// What the node is called that nobody can give to another meanwhile: its UUID.
    pub fn id(&self) -> String {
        self.node.uuid.to_string()
    }

    /// A refusal of the pool to a call that named the node by [`Found::id`], in words with the node's name.
    pub fn error(&self, error: PoolError) -> RpcError {
        let text = error.text.replace(&self.id(), &self.node.name);
        pool_error(PoolError { text, ..error })
    }
}

impl Daemon {
    /// The pool of that name or UUID.
    pub(super) fn pool_named(&self, name: &str) -> Result<Arc<Pool>, RpcError> {
        self.pools.get(name).map_err(|_| {
            let pools = self.pools.list();
            let names: Vec<&str> = pools.iter().map(|pool| pool.name()).collect();
            let error = RpcError::refused(libc::ENODEV, format!("there is no pool {name}"));
            match nearest(name, names.iter().copied()) {
                Some(near) => error.hint(format!("did you mean {near}?")),
                None if names.is_empty() => error.hint(NO_POOL),
                None => error.hint(format!("imported are {}", names.join(", "))),
            }
        })
    }

    /// The named pool, or the only one.
    pub(super) fn pool_or_only(&self, name: Option<&str>) -> Result<Arc<Pool>, RpcError> {
        if let Some(name) = name {
            return self.pool_named(name);
        }
        let mut pools = self.pools.list();
        if pools.len() > 1 {
            let names: Vec<&str> = pools.iter().map(|pool| pool.name()).collect();
            return Err(RpcError::field(
                "pool",
                format!("is needed where there are several: {}", names.join(", ")),
            ));
        }
        pools.pop().ok_or_else(|| RpcError::refused(libc::ENODEV, "no pool is imported").hint(NO_POOL))
    }

    /// The volume or snapshot called `name`: `NAME`, `POOL/NAME` or a UUID.
    pub(super) async fn node(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let (pools, plain) = self.places(name)?;
        match find_in(&pools, field, plain).await? {
            Some(found) => Ok(found),
            None => Err(self.no_node(&pools, name, plain).await),
        }
    }

    /// The same, at a cost that fits asking again and again: `None` when there is none or the name is not clear.
    pub(super) async fn node_if_any(&self, name: &str) -> Option<Found> {
        let (pools, plain) = self.places(name).ok()?;
        find_in(&pools, "name", plain).await.ok().flatten()
    }

    /// The pools in which `name` may be, and what it is called there.
    fn places<'a>(&self, name: &'a str) -> Result<(Vec<Arc<Pool>>, &'a str), RpcError> {
        Ok(match name.split_once('/') {
            Some((pool, plain)) => (vec![self.pool_named(pool)?], plain),
            None => (self.pools.list(), name),
        })
    }

    async fn no_node(&self, pools: &[Arc<Pool>], name: &str, plain: &str) -> RpcError {
        let error = RpcError::refused(libc::ENODEV, format!("there is no volume or snapshot {name}"));
        if pools.is_empty() {
            return error.hint(NO_POOL);
        }
        let mut names = Vec::new();
        for pool in pools {
            names.extend(pool.nodes().await.unwrap_or_default().into_iter().map(|node| node.name));
        }
        match nearest(plain, names.iter().map(String::as_str)) {
            Some(near) => error.hint(format!("did you mean {near}?")),
            None => error.hint("`rimrock volume list` and `rimrock snapshot list` show what there is"),
        }
    }

    /// The volume called `name` of the pool in the parameter `pool`, where that is given.
    pub(super) async fn volume_of(
        &self,
        field: &str,
        name: &str,
        pool: Option<&str>,
    ) -> Result<Found, RpcError> {
        let Some(pool) = pool else { return self.volume(field, name).await };
        let pool = self.pool_named(pool)?;
        let plain = match name.split_once('/') {
            Some((other, plain)) if self.pool_named(other)?.uuid() == pool.uuid() => plain,
            Some((other, _)) => {
                return Err(RpcError::field(
                    "pool",
                    format!("contradicts {field}, which names pool {other}"),
                ));
            }
            None => name,
        };
        self.volume(field, &format!("{}/{plain}", pool.name())).await
    }

    /// The volume called `name`; a snapshot is refused.
    pub(super) async fn volume(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let found = self.node(field, name).await?;
        match found.node.kind {
            NodeKind::Volume => Ok(found),
            NodeKind::Snapshot => Err(RpcError::field(field, format!("{name} is a snapshot, not a volume"))),
        }
    }

    /// The snapshot called `name`; a volume is refused.
    pub(super) async fn snapshot(&self, field: &str, name: &str) -> Result<Found, RpcError> {
        let found = self.node(field, name).await?;
        match found.node.kind {
            NodeKind::Snapshot => Ok(found),
            NodeKind::Volume => Err(RpcError::field(field, format!("{name} is a volume, not a snapshot"))),
        }
    }

    /// What stands behind a bdev name: a device, or a volume or snapshot by UUID or POOL/NAME.
    pub(super) async fn backend(&self, bdev_name: &str) -> Option<Addition> {
        if let Some(device) = self.devices.find(bdev_name) {
            if device.pool.borrow().is_some() {
                return None;
            }
            return Some(Addition {
                place: Place::Device { name: device.name.clone() },
                backend: Backend::Device(device.device.clone()),
                bdev_name: device.name.clone(),
                nsid: None,
                uuid: Some(device.uuid),
                nguid: None,
                eui64: None,
                block_size: None,
                read_only: false,
                anagrpid: None,
            });
        }
        let by_its_name = bdev_name.contains('/') || Uuid::try_parse(bdev_name).is_ok();
        let found = if by_its_name { self.node_if_any(bdev_name).await? } else { return None };
        self.node_backend(&found).await.ok()
    }

    /// A namespace for a volume or snapshot.
    pub(super) async fn node_backend(&self, found: &Found) -> Result<Addition, RpcError> {
        let volume = found.pool.open(&found.id()).await.map_err(pool_error)?;
        Ok(Addition {
            place: Place::Node { pool: found.pool.name().to_owned(), uuid: found.node.uuid },
            backend: Backend::Volume(volume),
            bdev_name: found.id(),
            nsid: None,
            uuid: None,
            nguid: None,
            eui64: None,
            block_size: Some(found.node.block_size),
            read_only: false,
            anagrpid: None,
        })
    }
}

async fn find_in(pools: &[Arc<Pool>], field: &str, plain: &str) -> Result<Option<Found>, RpcError> {
    // Some names lead to what nobody may see.
    if names::name(plain).is_err() {
        return Ok(None);
    }
    let mut found: Option<Found> = None;
    for pool in pools {
        let node = match pool.find(plain).await {
            Ok(node) => node,
            Err(error) if error.kind == PoolErrorKind::NotFound => continue,
            Err(error) => return Err(pool_error(error)),
        };
        if let Some(other) = found {
            let (one, other) = (pool.name(), other.pool.name());
            let reason = format!("{plain} is in the pools {other} and {one}; say POOL/NAME");
            return Err(RpcError::field(field, reason));
        }
        found = Some(Found { pool: pool.clone(), node });
    }
    Ok(found)
}

/// A refusal of a pool.
pub fn pool_error(error: PoolError) -> RpcError {
    let errno = match error.kind {
        PoolErrorKind::NotFound => libc::ENODEV,
        PoolErrorKind::Exists => libc::EEXIST,
        PoolErrorKind::Invalid => libc::EINVAL,
        PoolErrorKind::Busy => libc::EBUSY,
        PoolErrorKind::NoSpace => libc::ENOSPC,
        PoolErrorKind::Failed => libc::EIO,
    };
    RpcError::refused(errno, error.text)
}
