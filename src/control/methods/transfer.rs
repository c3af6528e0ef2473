//! Sending and receiving snapshots: what `rimrock snapshot send` and `receive` ask for.
#![forbid(unsafe_code)]

use super::bdev::BLOCK_SIZE;
use super::snapshot::{MAX_RANGES, OFFSET, diff_answer, diff_limits};
use super::volume::{SIZE, view};
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::lookup::{Found, pool_error};
use crate::control::schema::{Kind, Param, Params, UNSIGNED, optional, required};
use crate::control::table::{Chapter, Method};
use crate::control::transfers::{NSID, Task, Transfer};
use crate::pool::{Identity, NodeKind, Pool, PoolErrorKind, ReceiveSpec, receiving_name};
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Sending and receiving",
    preface: "The socket carries no data: a transfer shows its client a namespace over NVMe/TCP, on loopback, to be found \
              by that client alone. It ends when the client says so, when the client's connection to the namespace ends, \
              or when none was made within 10 s; what was received so far is deleted then. docs/send-stream.md says what \
              `rimrock snapshot send` makes of it.",
    methods: &[
        Method {
            name: "snapshot_send_begin",
            summary: "Shows a snapshot to be read. It cannot be deleted until the transfer ends, nor can the other.",
            params: &[
                required("name", Kind::Node, "The snapshot."),
                optional("from", Kind::Node, "An older snapshot of its pool with which it will be compared."),
                BY,
            ],
            result: "`session`, `address` (ADDR:PORT), `nqn`, `host_nqn`, `nsid`, and of the snapshot `name`, `uuid`, `pool`, \
                     `pool_uuid`, `base` (the other's UUID, or null), `size`, `block_size`, `created` and `epoch`.",
            run: |daemon, params| Box::pin(async move { send_begin(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_receive_begin",
            summary: "Makes a volume that nobody sees, empty or like a snapshot, and shows it to be written.",
            params: &[
                required("name", Kind::Name, "The name of the snapshot that it will be."),
                optional("pool", Kind::Name, "The pool; may be left out when there is one."),
                required("uuid", Kind::Uuid, "The snapshot's UUID; the pool must not have it yet."),
                optional("base", Kind::Uuid, "A snapshot of the pool: the volume begins as it."),
                required("size", SIZE, "The size in bytes."),
                optional("block_size", BLOCK_SIZE, "Block size for hosts, 512 or 4096 (the default)."),
                required("created", UNSIGNED, "When the snapshot was taken, seconds since 1970."),
                optional("data_bytes", UNSIGNED, "How much will be written; refused where there is no room."),
                BY,
            ],
            result: "`session`, `address` (ADDR:PORT), `nqn`, `host_nqn`, `nsid`, `name` and `pool`.",
            run: |daemon, params| Box::pin(async move { receive_begin(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_receive_diff",
            summary: "Tells which ranges of what is being received differ from its base, or hold data when there is none.",
            params: &[SESSION, OFFSET, MAX_RANGES],
            result: "what `snapshot_diff` answers.",
            run: |daemon, params| Box::pin(async move { receive_diff(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_receive_commit",
            summary: "Ends a transfer and makes what was received, and flushed, a snapshot, in one step.",
            params: &[SESSION],
            result: "the snapshot.",
            run: |daemon, params| {
                Box::pin(async move {
                    let (pool, node) = daemon.receive_commit(params.uuid("session")?).await?;
                    Ok(view(&daemon, &Found { pool, node }))
                })
            },
        },
        Method {
            name: "snapshot_transfer_end",
            summary: "Ends a transfer; what was received is deleted.",
            params: &[SESSION],
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    daemon.end_transfer(params.uuid("session")?).await?;
                    Ok(Value::Bool(true))
                })
            },
        },
        Method {
            name: "snapshot_transfer_list",
            summary: "Lists the transfers under way.",
            params: &[],
            result: "a list of `{session, kind, pool, name, uuid, base, by, started}`; `kind` is `send` or `receive`.",
            run: |daemon, _| {
                Box::pin(async move { Ok(daemon.transfers.list().iter().map(listed).collect()) })
            },
        },
    ],
};

const SESSION: Param = required("session", Kind::Uuid, "The transfer.");
const BY: Param = optional("by", Kind::Text { max: 200 }, "Who does it, for whoever is refused meanwhile.");

fn by(params: &Params) -> Result<&str, RpcError> {
    Ok(params.text_opt("by")?.unwrap_or("a client of the control socket"))
}

async fn send_begin(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let _changing = daemon.exports.lock().await;
    let snapshot = a_snapshot(daemon, "name", params.text("name")?).await?;
    let base = match params.text_opt("from")? {
        Some(from) => Some(a_snapshot(daemon, "from", from).await?),
        None => None,
    };
    if let Some(base) = &base {
        let (from, to) = (base.pool.name(), snapshot.pool.name());
        if base.pool.uuid() != snapshot.pool.uuid() {
            return Err(RpcError::field("from", format!("is in pool {from}, the snapshot in {to}")));
        }
        if base.node.uuid == snapshot.node.uuid {
            return Err(RpcError::field("from", "is the snapshot itself"));
        }
    }
    let transfer = daemon.send_begin(&snapshot, base.as_ref(), by(params)?).await?;
    let node = &snapshot.node;
    let mut answer = opened(&transfer);
    answer["uuid"] = json!(node.uuid);
    answer["pool_uuid"] = json!(snapshot.pool.uuid());
    answer["base"] = json!(base.map(|base| base.node.uuid));
    answer["size"] = json!(node.size);
    answer["block_size"] = json!(node.block_size);
    answer["created"] = json!(node.created);
    answer["epoch"] = json!(node.epoch);
    Ok(answer)
}

/// A snapshot to be sent. A volume changes while it is read.
async fn a_snapshot(daemon: &Daemon, field: &str, name: &str) -> Result<Found, RpcError> {
    let found = daemon.node(field, name).await?;
    match found.node.kind {
        NodeKind::Snapshot => Ok(found),
        NodeKind::Volume => Err(RpcError::field(field, format!("{name} is a volume, not a snapshot"))
            .hint(format!("take a snapshot of it first: rimrock snapshot create {name}@NAME"))),
    }
}

async fn receive_begin(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let _changing = daemon.exports.lock().await;
    let pool = daemon.pool_or_only(params.text_opt("pool")?)?;
    let (name, uuid, base) = (params.text("name")?, params.uuid("uuid")?, params.uuid_opt("base")?);
    refuse_existing(&pool, name, uuid).await?;
    let under_way = |transfer: &&Transfer| {
        let same = matches!(transfer.task, Task::Receive { identity, .. } if identity.uuid == uuid);
        transfer.pool == pool.name() && (same || transfer.name == name)
    };
    if let Some(other) = daemon.transfers.list().iter().find(under_way) {
        let text = format!("in pool {}, {} already", pool.name(), other.told());
        return Err(RpcError::refused(libc::EBUSY, text).with("field", "uuid"));
    }
    if let Some(base) = base {
        check_base(&pool, base).await?;
    }
    check_room(&pool, params.u64_opt("data_bytes")?.unwrap_or(0)).await?;
    let spec = ReceiveSpec {
        session: Uuid::new_v4(),
        base,
        size: params.u64("size")?,
        block_size: params.u64_opt("block_size")?.map_or(4096, |bytes| bytes as u32),
    };
    let identity = Identity { uuid, created: params.u64("created")? };
    Ok(opened(&daemon.receive_begin(&pool, name, spec, identity, by(params)?).await?))
}

async fn refuse_existing(pool: &Pool, name: &str, uuid: Uuid) -> Result<(), RpcError> {
    for (field, wanted) in [("uuid", uuid.to_string()), ("name", name.to_owned())] {
        let node = match pool.find(&wanted).await {
            Ok(node) => node,
            Err(error) if error.kind == PoolErrorKind::NotFound => continue,
            Err(error) => return Err(pool_error(error)),
        };
        let what = if node.kind == NodeKind::Snapshot { "snapshot" } else { "volume" };
        let (text, hint) = match node.uuid == uuid {
            true => (format!("pool {} has this snapshot already, as {}", pool.name(), node.name), None),
            false => (
                format!("pool {} has another {what} named {}", pool.name(), node.name),
                Some("receive it under another name"),
            ),
        };
        let error = RpcError::refused(libc::EEXIST, text).with("field", field);
        return Err(hint.map_or(error.clone(), |hint| error.hint(hint)));
    }
    Ok(())
}

async fn check_base(pool: &Pool, base: Uuid) -> Result<(), RpcError> {
    match pool.find(&base.to_string()).await {
        Ok(node) if node.kind == NodeKind::Snapshot => Ok(()),
        Ok(node) => Err(RpcError::field("base", format!("{} is a volume, not a snapshot", node.name))),
        Err(error) if error.kind == PoolErrorKind::NotFound => {
            let text = format!(
                "what comes is the difference from the snapshot with UUID {base}, which pool {} does not have",
                pool.name()
            );
            Err(RpcError::refused(libc::ENODEV, text).with("field", "base").hint(
                "receive that one first, or have everything sent: `rimrock snapshot send` without --from",
            ))
        }
        Err(error) => Err(pool_error(error)),
    }
}

async fn check_room(pool: &Pool, needed: u64) -> Result<(), RpcError> {
    let info = pool.info().await.map_err(pool_error)?;
    // What is just being given back counts: it is there when it is needed.
    let room = info.free + info.pending_free;
    if needed <= room || info.deleting > 0 {
        return Ok(());
    }
    let text = format!("{needed} bytes will be written, pool {} has room for {room}", pool.name());
    Err(RpcError::refused(libc::ENOSPC, text).with("field", "data_bytes"))
}

async fn receive_diff(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let transfer = daemon.transfers.get(params.uuid("session")?)?;
    let Task::Receive { base, .. } = transfer.task else {
        return Err(RpcError::field("session", "is that of a snapshot being sent"));
    };
    let (offset, max) = diff_limits(params)?;
    let pool: Arc<Pool> = daemon.pool_named(&transfer.pool)?;
    let (base, to) = (base.map(|base| base.to_string()), receiving_name(transfer.session));
    let part = pool.diff_part(base.as_deref(), &to, offset, max).await.map_err(pool_error)?;
    Ok(diff_answer(&part))
}

/// What a client needs to begin.
fn opened(transfer: &Transfer) -> Value {
    json!({
        "session": transfer.session,
        "address": transfer.door.address.to_string(),
        "nqn": transfer.door.nqn,
        "host_nqn": transfer.door.host_nqn,
        "nsid": NSID,
        "name": transfer.name,
        "pool": transfer.pool,
    })
}

fn listed(transfer: &Transfer) -> Value {
    let (kind, uuid, base) = match transfer.task {
        Task::Send { snapshot, base } => ("send", snapshot, base),
        Task::Receive { identity, base } => ("receive", identity.uuid, base),
    };
    json!({
        "session": transfer.session,
        "kind": kind,
        "pool": transfer.pool,
        "name": transfer.name,
        "uuid": uuid,
        "base": base,
        "by": transfer.by,
        "started": transfer.started,
    })
}
