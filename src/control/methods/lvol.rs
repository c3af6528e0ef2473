//! Pools, volumes and snapshots under SPDK's names: a pool is an lvstore, a node an lvol.
//!
//! A cluster here is the pool's block of 4 KiB, so that every count is exact. In SPDK's words a volume whose
//! parent is a snapshot is a clone of it, also the volume the snapshot was taken of.
#![forbid(unsafe_code)]

use super::bdev::{BDEV, Shape, bdev, errno};
use super::volume;
use crate::control::Daemon;
use crate::control::error::{INVALID_PARAMS, RpcError, errno_text};
use crate::control::lookup::{Found, pool_error};
use crate::control::schema::{Kind, Param, Params, UNSIGNED, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::{NodeInfo, NodeKind, Pool, PoolInfo, PoolOptions, VolumeSpec};
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "SPDK: logical volumes",
    preface: "An lvstore is a pool, an lvol a volume or snapshot. Clusters are counted in the pool's blocks of 4 KiB; \
              every lvol is thin.",
    methods: &[
        Method {
            name: "bdev_lvol_create_lvstore",
            summary: "Creates a pool on one device.",
            params: &[
                required("bdev_name", BDEV, "The device."),
                required("lvs_name", Kind::Name, "The pool's name."),
                optional("cluster_sz", UNSIGNED, "Accepted; space is allocated in blocks of 4 KiB."),
                optional("clear_method", CLEAR, "Accepted; nothing has to be cleared."),
                optional("num_md_pages_per_cluster_ratio", UNSIGNED, "Accepted and ignored."),
                optional("md_page_size", UNSIGNED, "Accepted and ignored."),
            ],
            result: "the pool's UUID.",
            run: |daemon, params| Box::pin(async move { create_lvstore(&daemon, &params).await }),
        },
        Method {
            name: "bdev_lvol_delete_lvstore",
            summary: "Destroys a pool of which nothing is exported.",
            params: &[LVS_UUID, LVS_NAME],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let name = lvstore(&daemon, &params, "uuid")?.name().to_owned();
                    daemon.destroy_pool(&name).await.map_err(in_errno_words)?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "bdev_lvol_get_lvstores",
            summary: "Lists pools, or shows one.",
            params: &[LVS_UUID, LVS_NAME],
            result: "a list of lvstores in SPDK's shape.",
            run: |daemon, params| Box::pin(async move { get_lvstores(&daemon, &params).await }),
        },
        Method {
            name: "bdev_lvol_create",
            summary: "Creates a volume.",
            params: &[
                required("lvol_name", Kind::Name, "Its name."),
                required("size_in_mib", MIB, "Its size in MiB."),
                optional(
                    "thin_provision",
                    Kind::Bool,
                    "Without it a volume larger than the free space is refused. Every volume is thin.",
                ),
                LVS_UUID,
                LVS_NAME,
                optional("clear_method", CLEAR, "Accepted; nothing has to be cleared."),
            ],
            result: "the volume's UUID, its bdev name.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "bdev_lvol_snapshot",
            summary: "Takes a snapshot of a volume.",
            params: &[
                required("lvol_name", BDEV, "The volume."),
                required("snapshot_name", Kind::Name, "The snapshot's name."),
            ],
            result: "the snapshot's UUID.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = lvol(&daemon, params.text("lvol_name")?).await?;
                    let name = params.text("snapshot_name")?;
                    let node = found.pool.snapshot_create(&found.id(), name).await;
                    Ok(json!(node.map_err(refusal)?.uuid))
                })
            },
        },
        Method {
            name: "bdev_lvol_clone",
            summary: "Makes a volume that begins as a snapshot.",
            params: &[
                required("snapshot_name", BDEV, "The snapshot."),
                required("clone_name", Kind::Name, "The new volume's name."),
            ],
            result: "the volume's UUID.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = lvol(&daemon, params.text("snapshot_name")?).await?;
                    if found.node.kind != NodeKind::Snapshot {
                        let error = RpcError::field("snapshot_name", "is not a snapshot");
                        return Err(error.spoken_as(INVALID_PARAMS, errno_text(libc::EINVAL)));
                    }
                    let node = found.pool.clone_create(&found.id(), params.text("clone_name")?).await;
                    Ok(json!(node.map_err(refusal)?.uuid))
                })
            },
        },
        Method {
            name: "bdev_lvol_delete",
            summary: "Deletes a volume or snapshot that is not exported; a snapshot may have clones.",
            params: &[required("name", BDEV, "The volume or snapshot.")],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = lvol(&daemon, params.text("name")?).await?;
                    volume::delete(&daemon, &found).await.map_err(in_errno_words)
                })
            },
        },
        Method {
            name: "bdev_lvol_resize",
            summary: "Makes a volume larger. Shrinking is refused, since it loses data: see `volume_resize`.",
            params: &[
                required("name", BDEV, "The volume."),
                required("size_in_mib", MIB, "The new size in MiB."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = lvol(&daemon, params.text("name")?).await?;
                    let size = params.u64("size_in_mib")? << 20;
                    volume::resize(&daemon, found, size, false).await.map_err(in_errno_words)?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "bdev_lvol_rename",
            summary: "Gives a volume or snapshot another name.",
            params: &[
                required("old_name", BDEV, "The volume or snapshot."),
                required("new_name", Kind::Name, "The new name."),
            ],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = lvol(&daemon, params.text("old_name")?).await?;
                    volume::rename(found, params.text("new_name")?).await.map_err(in_errno_words)?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "bdev_lvol_get_lvols",
            summary: "Lists the volumes and snapshots of all pools, or of one.",
            params: &[optional("lvs_uuid", Kind::Uuid, "Only of the pool with this UUID."), LVS_NAME],
            result: "a list of lvols in SPDK's shape.",
            run: |daemon, params| Box::pin(async move { get_lvols(&daemon, &params).await }),
        },
    ],
};

const CLEAR: Kind = Kind::OneOf(&["default", "none", "unmap", "write_zeroes"]);
const MIB: Kind = Kind::Unsigned { min: 1, max: (i64::MAX >> 20) as u64 };
const LVS_UUID: Param = optional("uuid", Kind::Uuid, "The pool, by UUID.");
const LVS_NAME: Param = optional("lvs_name", Kind::Name, "The pool, by name.");

/// A refusal of a pool in SPDK's words.
fn refusal(error: crate::pool::PoolError) -> RpcError {
    in_errno_words(pool_error(error))
}

/// An error with a negative errno as its code gets the errno's text as its message.
fn in_errno_words(error: RpcError) -> RpcError {
    let code = error.code;
    match i32::try_from(-code) {
        Ok(errno @ 1..=4095) => error.spoken_as(code, errno_text(errno)),
        _ => error,
    }
}

/// The volume or snapshot with that bdev name: its UUID or POOL/NAME.
async fn lvol(daemon: &Rc<Daemon>, name: &str) -> Result<Found, RpcError> {
    match name.contains('/') || Uuid::try_parse(name).is_ok() {
        true => daemon.node("name", name).await.map_err(in_errno_words),
        false => Err(errno(
            libc::ENODEV,
            format!("there is no lvol {name}; its bdev name is POOL/NAME or its UUID"),
        )),
    }
}

/// The pool that `lvs_name` or the UUID names; the caller must give one of them.
fn lvstore(daemon: &Daemon, params: &Params, uuid_field: &str) -> Result<Arc<Pool>, RpcError> {
    let found = match (params.uuid_opt(uuid_field)?, params.text_opt("lvs_name")?) {
        (Some(_), Some(_)) => {
            return Err(RpcError::field("lvs_name", format!("contradicts {uuid_field}; give one of them")));
        }
        (Some(uuid), None) => daemon.pool_named(&uuid.to_string()),
        (None, Some(name)) => daemon.pool_named(name),
        (None, None) => return Err(RpcError::field("lvs_name", format!("or {uuid_field} is required"))),
    };
    found.map_err(in_errno_words)
}

async fn create_lvstore(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (bdev_name, name) = (params.text("bdev_name")?, params.text("lvs_name")?);
    let device = daemon.devices.find(bdev_name);
    let device = device.ok_or_else(|| errno(libc::ENODEV, format!("there is no device {bdev_name}")))?;
    // SPDK's client is used to creating over whatever lies there; a live pool of ours is refused all the same.
    let created = daemon.create_pool(name, std::slice::from_ref(&device.name), PoolOptions::default()).await;
    match created {
        Ok(info) => Ok(json!(info.uuid)),
        // SPDK's answer for a device that holds an lvstore already.
        Err(error) if error.code == -i64::from(libc::EBUSY) => {
            Err(error.spoken_as(-i64::from(libc::EPERM), errno_text(libc::EPERM)))
        }
        Err(error) => Err(in_errno_words(error)),
    }
}

async fn get_lvstores(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let pools = match params.has("uuid") || params.has("lvs_name") {
        true => vec![lvstore(daemon, params, "uuid")?],
        false => daemon.pools.list(),
    };
    let mut stores = Vec::new();
    for pool in pools {
        let info = pool.info().await.map_err(refusal)?;
        let cluster = u64::from(info.block_size);
        stores.push(json!({
            "uuid": info.uuid,
            "name": info.name,
            "base_bdev": base_bdev(daemon, &info.name),
            "total_data_clusters": info.capacity / cluster,
            "free_clusters": info.free / cluster,
            "block_size": info.block_size,
            "cluster_size": info.block_size,
            "max_growable_size": capacity_of_devices(&info),
        }));
    }
    Ok(Value::Array(stores))
}

fn capacity_of_devices(info: &PoolInfo) -> u64 {
    info.devices.iter().map(|device| device.size).sum()
}

/// The name of a pool's first device.
fn base_bdev(daemon: &Daemon, pool: &str) -> String {
    daemon.devices.of_pool(pool).first().map(|device| device.name.clone()).unwrap_or_default()
}

async fn create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let pool = lvstore(daemon, params, "uuid")?;
    let size = params.u64("size_in_mib")? << 20;
    if !params.bool_opt("thin_provision")?.unwrap_or(false) {
        let free = pool.info().await.map_err(refusal)?.free;
        if size > free {
            let reason = format!("{size} bytes are asked for, {free} are free; thin_provision allows more");
            return Err(
                RpcError::field("size_in_mib", reason).spoken_as(INVALID_PARAMS, errno_text(libc::ENOSPC))
            );
        }
    }
    let name = params.text("lvol_name")?.to_owned();
    let spec = VolumeSpec { name, size, block_size: 4096, write_cache: true, uuid: None };
    Ok(json!(pool.volume_create(spec).await.map_err(refusal)?.uuid))
}

async fn get_lvols(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let pools = match params.has("lvs_uuid") || params.has("lvs_name") {
        true => vec![lvstore(daemon, params, "lvs_uuid")?],
        false => daemon.pools.list(),
    };
    let mut lvols = Vec::new();
    for pool in pools {
        for node in pool.nodes().await.map_err(refusal)? {
            lvols.push(json!({
                "alias": format!("{}/{}", pool.name(), node.name),
                "uuid": node.uuid,
                "name": node.name,
                "is_thin_provisioned": true,
                "is_snapshot": node.kind == NodeKind::Snapshot,
                "is_clone": is_clone(&node),
                "is_esnap_clone": false,
                "is_degraded": false,
                "num_allocated_clusters": node.written / 4096,
                "lvs": { "name": pool.name(), "uuid": pool.uuid() },
            }));
        }
    }
    Ok(Value::Array(lvols))
}

fn is_clone(node: &NodeInfo) -> bool {
    node.kind == NodeKind::Volume && node.parent.is_some()
}

/// Every volume and snapshot as a bdev.
pub async fn all_bdevs(daemon: &Daemon) -> Result<Vec<Value>, RpcError> {
    let mut bdevs = Vec::new();
    for pool in daemon.pools.list() {
        bdevs.extend(pool.nodes().await.map_err(refusal)?.iter().map(|node| node_bdev(daemon, &pool, node)));
    }
    Ok(bdevs)
}

/// The volume or snapshot with that bdev name, as a bdev.
pub async fn one_bdev(daemon: &Rc<Daemon>, name: &str) -> Option<Value> {
    let by_its_name = name.contains('/') || Uuid::try_parse(name).is_ok();
    let found = if by_its_name { daemon.node_if_any(name).await? } else { return None };
    Some(node_bdev(daemon, &found.pool, &found.node))
}

fn node_bdev(daemon: &Daemon, pool: &Pool, node: &NodeInfo) -> Value {
    let snapshot = node.kind == NodeKind::Snapshot;
    let mut lvol = Map::new();
    let mut put = |key: &str, value: Value| lvol.insert(key.to_owned(), value);
    put("lvol_store_uuid", json!(pool.uuid()));
    put("base_bdev", json!(base_bdev(daemon, pool.name())));
    put("thin_provision", json!(true));
    put("num_allocated_clusters", json!(node.written / 4096));
    put("snapshot", json!(snapshot));
    put("clone", json!(is_clone(node)));
    if let (Some(parent), false) = (&node.parent, snapshot) {
        put("base_snapshot", json!(parent));
    }
    if snapshot && !node.children.is_empty() {
        put("clones", json!(node.children));
    }
    put("esnap_clone", json!(false));
    bdev(Shape {
        name: node.uuid.to_string(),
        aliases: vec![format!("{}/{}", pool.name(), node.name)],
        product_name: "Logical Volume",
        block_size: node.block_size.into(),
        num_blocks: node.size / u64::from(node.block_size),
        uuid: node.uuid.to_string(),
        claimed: false,
        writable: !snapshot,
        driver_specific: json!({ "lvol": lvol }),
    })
}
