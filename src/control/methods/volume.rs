//! Volumes, and clones, which are volumes that began as a snapshot.
#![forbid(unsafe_code)]

use super::bdev::BLOCK_SIZE;
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::lookup::{Found, pool_error};
use crate::control::names::NAME_BYTES_MAX;
use crate::control::schema::{Kind, Param, Params, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::{NodeInfo, NodeKind, Pool, PoolError, PoolErrorKind, VolumeSpec};
use serde_json::{Map, Value, json};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Volumes",
    preface: "Volumes are thin: space is used as they are written, and comes back as they are trimmed. A volume is \
              named NAME, POOL/NAME or by its UUID; the pool may be left out where the name is clear.",
    methods: &[
        Method {
            name: "volume_create",
            summary: "Creates a thin volume. Repeating the call gives the same volume.",
            params: &[
                required("name", Kind::Name, "Its name."),
                required("size", SIZE, "Its size in bytes, rounded up to 1 MiB."),
                optional("pool", Kind::Name, "The pool; may be left out when there is one."),
                optional("block_size", BLOCK_SIZE, "Block size for hosts, 512 or 4096 (the default)."),
                optional(
                    "write_cache",
                    Kind::Bool,
                    "Acknowledge writes before they are on stable media, until a flush (the default).",
                ),
                optional("uuid", Kind::Uuid, "Its UUID; a random one when left out."),
            ],
            result: "the volume: `name`, `pool`, `kind`, `uuid`, `size`, `parent`, `children`, `referenced`, `written`, \
                     `unique`, `block_size`, `write_cache`, `read_only`, `created`, `pins`, `pinned_by`, `exports`.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "volume_list",
            summary: "Lists volumes.",
            params: &[
                optional("pool", Kind::Name, "Only of this pool."),
                optional("clones", Kind::Bool, "Only those that share space with a snapshot."),
            ],
            result: "a list of volumes.",
            run: |daemon, params| {
                Box::pin(async move {
                    let clones = params.bool_opt("clones")?.unwrap_or(false);
                    list(&daemon, &params, |node| {
                        node.kind == NodeKind::Volume && (!clones || node.parent.is_some())
                    })
                    .await
                })
            },
        },
        Method {
            name: "volume_get",
            summary: "Shows one volume.",
            params: BY_NAME,
            result: "the volume.",
            run: |daemon, params| {
                Box::pin(async move {
                    daemon.volume("name", params.text("name")?).await?;
                    get(&daemon, daemon.node("name", params.text("name")?).await?).await
                })
            },
        },
        Method {
            name: "volume_delete",
            summary: "Deletes a volume that is not exported. Its space comes back in the background.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.volume("name", params.text("name")?).await?;
                    delete(&daemon, &found).await
                })
            },
        },
        Method {
            name: "volume_resize",
            summary: "Gives a volume another size. Connected hosts are told.",
            params: &[
                NAME,
                required("size", SIZE, "The new size in bytes, rounded up to 1 MiB."),
                optional("allow_shrink", Kind::Bool, "Let the end of the volume be lost; refused without."),
            ],
            result: "the volume.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.volume("name", params.text("name")?).await?;
                    let shrink = params.bool_opt("allow_shrink")?.unwrap_or(false);
                    let found = resize(&daemon, found, params.u64("size")?, shrink).await?;
                    Ok(view(&daemon, &found))
                })
            },
        },
        Method {
            name: "volume_rename",
            summary: "Gives a volume or snapshot another name. Exports go on under their old NQN.",
            params: &[NAME, required("new_name", Kind::Name, "The new name.")],
            result: "the volume or snapshot.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.node("name", params.text("name")?).await?;
                    let found = rename(found, params.text("new_name")?).await?;
                    Ok(view(&daemon, &found))
                })
            },
        },
        Method {
            name: "volume_rollback",
            summary: "Makes a volume what a snapshot was. What it held is kept as a snapshot unless that is declined.",
            params: &[
                optional("name", Kind::Node, "The volume; the one the snapshot was taken of when left out."),
                required(
                    "snapshot",
                    Kind::Node,
                    "The snapshot: one of the volume, or one that it grew from.",
                ),
                optional("foreign", Kind::Bool, "Take any other snapshot of the pool too; refused without."),
                optional(
                    "keep",
                    Kind::Name,
                    "The name under which what it held is kept; `VOLUME@before-rollback-N` when left out.",
                ),
                optional("discard", Kind::Bool, "Keep nothing of what it held."),
            ],
            result: "`name`, `snapshot` and `kept` (null when discarded).",
            run: |daemon, params| Box::pin(async move { rollback(&daemon, &params).await }),
        },
        Method {
            name: "volume_promote",
            summary: "Makes a clone the main line: the snapshots it shares with the volume it was made from become its own, and \
                      that volume from now on is the clone.",
            params: &[required("name", Kind::Node, "The clone.")],
            result: "the promoted volume.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.volume("name", params.text("name")?).await?;
                    let promoted = found.pool.promote(&found.id()).await;
                    let node = promoted.map_err(|error| found.error(error))?;
                    Ok(view(&daemon, &Found { node, ..found }))
                })
            },
        },
        Method {
            name: "volume_export",
            summary: "Makes a volume, or a snapshot (read-only), available over NVMe/TCP: subsystem, namespace and \
                      listener in one step. Repeating the call gives the same export.",
            params: &[
                NAME,
                optional(
                    "listen",
                    Kind::Text { max: 64 },
                    "Where to listen, as ADDR:PORT; `target.listen` of the configuration when left out.",
                ),
                optional(
                    "nqn",
                    Kind::Nqn,
                    "The NQN; derived from the pool's and the volume's name when left out.",
                ),
                optional(
                    "hosts",
                    Kind::List { of: &Kind::Nqn, max: 256 },
                    "Hosts that may connect; any when left out.",
                ),
                optional("read_only", Kind::Bool, "Refuse writes, though it is a volume."),
            ],
            result: "`name`, `nqn`, `nsid`, `listen` (a list of ADDR:PORT) and `connect` (a list of command lines for the host).",
            run: |daemon, params| Box::pin(async move { super::export::export(&daemon, &params).await }),
        },
        Method {
            name: "volume_unexport",
            summary: "Ends every export of a volume or snapshot. A subsystem that showed nothing else is deleted.",
            params: BY_NAME,
            result: "the list of NQNs that showed it.",
            run: |daemon, params| {
                Box::pin(async move { super::export::unexport(&daemon, params.text("name")?).await })
            },
        },
    ],
};

/// Any size of a volume.
pub const SIZE: Kind = Kind::Unsigned { min: 1, max: i64::MAX as u64 };
const NAME: Param = required("name", Kind::Node, "The volume.");
const BY_NAME: &[Param] = &[NAME];

async fn create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let pool = daemon.pool_or_only(params.text_opt("pool")?)?;
    let block_size = match params.u64_opt("block_size")? {
        Some(512) => 512,
        _ => 4096,
    };
    let spec = VolumeSpec {
        name: params.text("name")?.to_owned(),
        size: params.u64("size")?,
        block_size,
        write_cache: params.bool_opt("write_cache")?.unwrap_or(true),
        uuid: params.uuid_opt("uuid")?,
    };
    let node = made_or_same(&pool, &spec.name, pool.volume_create(spec.clone()).await, |node| {
        same_volume(node, &spec)
    });
    let node = node.await?;
    Ok(view(daemon, &Found { pool, node }))
}

/// What a call made, or what an earlier call like it made, judged by `same`.
///
/// It is tried first and looked at after: the pool makes one thing at a time, so when it says that the name is taken,
/// whoever took it has been answered for, or would be.
pub async fn made_or_same(
    pool: &Pool,
    name: &str,
    made: Result<NodeInfo, PoolError>,
    same: impl Fn(&NodeInfo) -> Result<(), RpcError>,
) -> Result<NodeInfo, RpcError> {
    match made {
        Err(error) if error.kind == PoolErrorKind::Exists => match pool.find(name).await {
            Ok(node) if node.name == name => same(&node).map(|()| node),
            _ => Err(pool_error(error)),
        },
        made => made.map_err(pool_error),
    }
}

/// Whether an existing volume is what a repeated call asks for; else which parameter differs.
fn same_volume(node: &NodeInfo, spec: &VolumeSpec) -> Result<(), RpcError> {
    let differs = match node {
        node if node.kind != NodeKind::Volume => Some(("name", "a snapshot".to_owned())),
        node if node.origin.is_some() => Some(("name", "a clone".to_owned())),
        node if node.size != spec.size.next_multiple_of(1 << 20) => {
            Some(("size", format!("of {} bytes", node.size)))
        }
        node if node.block_size != spec.block_size => {
            Some(("block_size", format!("with blocks of {} bytes", node.block_size)))
        }
        node if node.write_cache != spec.write_cache => {
            Some(("write_cache", format!("with write_cache {}", node.write_cache)))
        }
        node if spec.uuid.is_some_and(|uuid| uuid != node.uuid) => {
            Some(("uuid", format!("with UUID {}", node.uuid)))
        }
        _ => None,
    };
    match differs {
        None => Ok(()),
        Some((field, what)) => {
            Err(RpcError::refused(libc::EEXIST, format!("{} exists already, {what}", spec.name))
                .with("field", field))
        }
    }
}

/// The nodes of one pool or all that satisfy `wanted`, in the pools' order.
pub async fn list(
    daemon: &Rc<Daemon>,
    params: &Params,
    wanted: impl Fn(&NodeInfo) -> bool,
) -> Result<Value, RpcError> {
    let pools = match params.text_opt("pool")? {
        Some(name) => vec![daemon.pool_named(name)?],
        None => daemon.pools.list(),
    };
    let mut views = Vec::new();
    for pool in pools {
        for node in pool.nodes().await.map_err(pool_error)?.into_iter().filter(&wanted) {
            views.push(node_view(daemon, pool.name(), &node));
        }
    }
    Ok(Value::Array(views))
}

/// One node with all that is counted of it.
pub async fn get(daemon: &Rc<Daemon>, mut found: Found) -> Result<Value, RpcError> {
    found.node = found.pool.node(&found.id()).await.map_err(pool_error)?;
    Ok(view(daemon, &found))
}

/// Deletes a node that is not exported.
pub async fn delete(daemon: &Rc<Daemon>, found: &Found) -> Result<Value, RpcError> {
    let _changing = daemon.exports.lock().await;
    let name = &found.node.name;
    if let Some((nqn, nsid)) = daemon.exports.of_node(found.node.uuid).first() {
        return Err(RpcError::refused(
            libc::EBUSY,
            format!("{name} is exported, as namespace {nsid} of {nqn}"),
        )
        .hint(format!("end that first: rimrock volume unexport {name}")));
    }
    if let Some(transfer) = daemon.transfers.needing(found.pool.name(), found.node.uuid).first() {
        let text = format!("{name} cannot be deleted: it is needed, since {}", transfer.told());
        return Err(RpcError::refused(libc::EBUSY, text));
    }
    found.pool.delete(&found.id()).await.map_err(|error| found.error(error))?;
    Ok(Value::Bool(true))
}

/// Resizes a volume and tells the hosts.
pub async fn resize(
    daemon: &Rc<Daemon>,
    mut found: Found,
    size: u64,
    shrink: bool,
) -> Result<Found, RpcError> {
    found.node = found.pool.resize(&found.id(), size, shrink).await.map_err(|error| found.error(error))?;
    daemon.target.namespace_resized(found.node.uuid);
    Ok(found)
}

/// Renames a node.
pub async fn rename(mut found: Found, new_name: &str) -> Result<Found, RpcError> {
    if found.node.name != new_name {
        found.node = found.pool.rename(&found.id(), new_name).await.map_err(|error| found.error(error))?;
    }
    Ok(found)
}

async fn rollback(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (snapshot, volume) = match params.text_opt("name")? {
        Some(name) => {
            let volume = daemon.volume("name", name).await?;
            let snapshot_name = params.text("snapshot")?;
            // A snapshot named without its pool is one of the volume's own.
            let qualified = match snapshot_name.contains('/') {
                true => snapshot_name.to_owned(),
                false => format!("{}/{snapshot_name}", volume.pool.name()),
            };
            (daemon.snapshot("snapshot", &qualified).await?, volume)
        }
        None => {
            let snapshot = daemon.snapshot("snapshot", params.text("snapshot")?).await?;
            let volume = snapshot.node.volume_uuid.ok_or_else(|| {
                let text = format!("the volume that {} was taken of is gone", snapshot.node.name);
                RpcError::refused(libc::ENODEV, text).hint("make a clone of it, or name another volume")
            })?;
            let volume = format!("{}/{volume}", snapshot.pool.name());
            let volume = daemon.volume("snapshot", &volume).await?;
            (snapshot, volume)
        }
    };
    if snapshot.pool.uuid() != volume.pool.uuid() {
        return Err(RpcError::field(
            "snapshot",
            format!("is in pool {}, the volume in another", snapshot.pool.name()),
        ));
    }
    if !params.bool_opt("foreign")?.unwrap_or(false) {
        let own =
            volume.pool.is_of(&volume.id(), &snapshot.id()).await.map_err(|error| volume.error(error))?;
        if !own {
            let text = format!("{} is no snapshot of {}", snapshot.node.name, volume.node.name);
            return Err(RpcError::refused(libc::EINVAL, text)
                .hint("make a clone of it, or set foreign (`--foreign`) to make the volume what that was"));
        }
    }
    let roll = async |keep| volume.pool.rollback(&volume.id(), &snapshot.id(), keep).await;
    let done = match (params.text_opt("keep")?, params.bool_opt("discard")?.unwrap_or(false)) {
        (Some(_), true) => return Err(RpcError::field("discard", "contradicts keep")),
        (Some(keep), false) => roll(Some(keep.to_owned())).await,
        (None, true) => roll(None).await,
        (None, false) => {
            let mut number = 1;
            loop {
                match roll(Some(kept_name(&volume.node.name, number))).await {
                    Err(error) if error.kind == PoolErrorKind::Exists => number += 1,
                    done => break done,
                }
            }
        }
    };
    let kept = done.map_err(|error| volume.error(error))?.kept;
    daemon.target.namespace_resized(volume.node.uuid);
    Ok(json!({
        "name": volume.node.name,
        "pool": volume.pool.name(),
        "snapshot": snapshot.node.name,
        "kept": kept,
    }))
}

/// The name under which a rollback keeps what `volume` held, unless told otherwise: shortened where it must be.
fn kept_name(volume: &str, number: u64) -> String {
    let end = format!("@before-rollback-{number}");
    let room = NAME_BYTES_MAX - end.len();
    format!("{}{end}", volume.get(..room).unwrap_or(volume))
}

/// A node as the callers see it.
pub fn view(daemon: &Daemon, found: &Found) -> Value {
    node_view(daemon, found.pool.name(), &found.node)
}

fn node_view(daemon: &Daemon, pool: &str, node: &NodeInfo) -> Value {
    let exports: Vec<String> =
        daemon.exports.of_node(node.uuid).into_iter().map(|(nqn, nsid)| format!("{nqn}/{nsid}")).collect();
    let mut object = Map::new();
    if let Value::Object(members) = json!(node) {
        object = members;
    }
    object.insert("pool".to_owned(), json!(pool));
    object.insert("read_only".to_owned(), json!(node.kind == NodeKind::Snapshot));
    let mut by: Vec<String> = node.pins.iter().map(|pin| pin.by.clone()).collect();
    by.extend(daemon.transfers.needing(pool, node.uuid).into_iter().map(|transfer| transfer.by));
    object.insert("pinned_by".to_owned(), json!(by));
    object.insert("exports".to_owned(), json!(exports));
    Value::Object(object)
}
