//! Snapshots, clones and differences.
#![forbid(unsafe_code)]

use super::volume::{delete, get, list, made_or_same, view};
use crate::control::Daemon;
use crate::control::error::RpcError;
use crate::control::lookup::{Found, pool_error};
use crate::control::schema::{Kind, Param, Params, UNSIGNED, optional, required};
use crate::control::table::{Chapter, Method};
use crate::pool::{DiffPart, NodeInfo, NodeKind, Pool, PoolError, PoolErrorKind, RangeKind};
use serde_json::{Value, json};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "Snapshots and clones",
    preface: "A snapshot is instant and shares all space with its volume. By convention a snapshot of VOLUME is \
              named VOLUME@SOMETHING. A clone is a volume that begins as a snapshot.",
    methods: &[
        Method {
            name: "snapshot_create",
            summary: "Takes a snapshot of a volume. Repeating the call gives the same snapshot.",
            params: &[
                required("volume", Kind::Node, "The volume."),
                required("name", Kind::Name, "The snapshot's whole name, such as `model@step-1000`."),
                optional("pool", Kind::Name, "The pool; may be left out where the volume's name is clear."),
            ],
            result: "the snapshot, in the form of a volume.",
            run: |daemon, params| Box::pin(async move { create(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_create_group",
            summary: "Takes snapshots of several volumes of one pool in one instant. Repeating the call gives the same \
                      snapshots.",
            params: &[required(
                "snapshots",
                Kind::List { of: &Kind::Object(MEMBER), max: 256 },
                "The volumes and names.",
            )],
            result: "the list of snapshots.",
            run: |daemon, params| Box::pin(async move { create_group(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_list",
            summary: "Lists snapshots.",
            params: &[
                optional("volume", Kind::Node, "Only those taken of this volume."),
                optional("pool", Kind::Name, "Only of this pool."),
            ],
            result: "a list of snapshots.",
            run: |daemon, params| Box::pin(async move { list_snapshots(&daemon, &params).await }),
        },
        Method {
            name: "snapshot_get",
            summary: "Shows one snapshot.",
            params: BY_NAME,
            result: "the snapshot.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.snapshot("name", params.text("name")?).await?;
                    get(&daemon, found).await
                })
            },
        },
        Method {
            name: "snapshot_delete",
            summary: "Deletes a snapshot that is not exported. Space that only it used comes back in the background.",
            params: BY_NAME,
            result: "`true`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.snapshot("name", params.text("name")?).await?;
                    delete(&daemon, &found).await
                })
            },
        },
        Method {
            name: "snapshot_pin",
            summary: "Pins a snapshot, or a volume: it cannot be deleted, nor a volume's state be discarded, until it is unpinned \
                      by the same. Repeating the call replaces the reason.",
            params: &[
                required("name", Kind::Node, "The snapshot or volume."),
                BY,
                optional("reason", Kind::Text { max: 1000 }, "Why, for whoever is refused."),
            ],
            result: "the snapshot or volume; `pins` is a list of `{by, reason, created}`.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.node("name", params.text("name")?).await?;
                    let reason = params.text_opt("reason")?.map(str::to_owned);
                    let pinned = found.pool.pin(&found.id(), params.text("by")?, reason).await;
                    pinned_view(&daemon, found, pinned)
                })
            },
        },
        Method {
            name: "snapshot_unpin",
            summary: "Takes a pin away. Other pins of the snapshot or volume stay.",
            params: &[required("name", Kind::Node, "The snapshot or volume."), BY],
            result: "the snapshot or volume.",
            run: |daemon, params| {
                Box::pin(async move {
                    let found = daemon.node("name", params.text("name")?).await?;
                    let unpinned = found.pool.unpin(&found.id(), params.text("by")?).await;
                    pinned_view(&daemon, found, unpinned)
                })
            },
        },
        Method {
            name: "snapshot_diff",
            summary: "Tells which ranges of a snapshot or volume differ from another of its pool, or which hold data. Costs \
                      what differs, not what exists.",
            params: &[
                optional("from", Kind::Node, "The older; all ranges that hold data when left out."),
                required("to", Kind::Node, "The newer. Nothing is said of what lies beyond its end."),
                OFFSET,
                MAX_RANGES,
            ],
            result: "`ranges` (a list of `{offset, length, kind}` in bytes, ascending; `kind` is `data`, or `zero` for what \
                     is empty in the newer), `changed_bytes` (their sum), `next_offset` (null at the end; there may be \
                     more although nothing is listed) and `truncated`.",
            run: |daemon, params| Box::pin(async move { diff(&daemon, &params).await }),
        },
        Method {
            name: "clone_create",
            summary: "Makes a new volume that begins as a snapshot. Repeating the call gives the same volume.",
            params: &[
                required("snapshot", Kind::Node, "The snapshot."),
                required("name", Kind::Name, "The new volume's name."),
            ],
            result: "the volume.",
            run: |daemon, params| Box::pin(async move { clone(&daemon, &params).await }),
        },
    ],
};

/// Ranges of one answer unless more or fewer are asked for.
const RANGES_DEFAULT: usize = 10_000;
/// Where a part of a difference begins.
pub const OFFSET: Param =
    optional("offset", UNSIGNED, "Where to begin, a multiple of 4096: `next_offset` of the answer before.");
/// How large a part may be.
pub const MAX_RANGES: Param = optional(
    "max_ranges",
    Kind::Unsigned { min: 1, max: 100_000 },
    "The most ranges to list; 10000 when left out.",
);
const BY: Param = required("by", Kind::Name, "Who pins it.");
const BY_NAME: &[Param] = &[required("name", Kind::Node, "The snapshot.")];
const MEMBER: &[Param] = &[
    required("volume", Kind::Node, "The volume."),
    required("name", Kind::Name, "The snapshot's whole name."),
];

async fn create(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let volume = daemon.volume_of("volume", params.text("volume")?, params.text_opt("pool")?).await?;
    let name = params.text("name")?;
    let made = volume.pool.snapshot_create(&volume.id(), name).await;
    let node = made_or_same(&volume.pool, name, made, |node| same_snapshot(&volume.node, node)).await?;
    Ok(view(daemon, &Found { node, ..volume }))
}

/// Whether an existing node is a snapshot of that volume.
fn same_snapshot(volume: &NodeInfo, node: &NodeInfo) -> Result<(), RpcError> {
    let what = match node.kind {
        NodeKind::Snapshot if node.volume_uuid == Some(volume.uuid) => return Ok(()),
        NodeKind::Snapshot => "a snapshot of another volume",
        NodeKind::Volume => "a volume",
    };
    Err(RpcError::refused(libc::EEXIST, format!("{} exists already, as {what}", node.name))
        .with("field", "name"))
}

async fn create_group(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let mut pool = None;
    let mut wanted = Vec::new();
    for (at, member) in params.objects("snapshots")?.iter().enumerate() {
        let field = format!("snapshots[{at}].volume");
        let volume = daemon.volume(&field, member.text("volume")?).await?;
        let first = pool.get_or_insert(volume.pool.clone());
        if first.uuid() != volume.pool.uuid() {
            return Err(RpcError::field(
                field,
                format!("is not in pool {}, as the others are", first.name()),
            ));
        }
        wanted.push((volume.node, member.text("name")?.to_owned()));
    }
    let Some(pool) = pool else {
        return Err(RpcError::field("snapshots", "must name at least one volume"));
    };
    let pairs = wanted.iter().map(|(volume, name)| (volume.uuid.to_string(), name.clone()));
    let taken = match pool.snapshot_group(pairs.collect()).await {
        Err(error) if error.kind == PoolErrorKind::Exists => match same_group(&pool, &wanted).await {
            Some(taken) => taken,
            None => return Err(pool_error(error)),
        },
        taken => taken.map_err(pool_error)?,
    };
    let views = taken.into_iter().map(|node| view(daemon, &Found { pool: pool.clone(), node }));
    Ok(views.collect())
}

/// The snapshots that an earlier call like this took: all there, of these volumes, and of one instant.
async fn same_group(pool: &Pool, wanted: &[(NodeInfo, String)]) -> Option<Vec<NodeInfo>> {
    let mut taken: Vec<NodeInfo> = Vec::new();
    for (volume, name) in wanted {
        let node = pool.find(name).await.ok()?;
        let of_one_instant = taken.first().is_none_or(|first| first.epoch == node.epoch);
        if !of_one_instant || same_snapshot(volume, &node).is_err() {
            return None;
        }
        taken.push(node);
    }
    Some(taken)
}

fn pinned_view(
    daemon: &Daemon,
    found: Found,
    pinned: Result<NodeInfo, PoolError>,
) -> Result<Value, RpcError> {
    let node = pinned.map_err(|error| found.error(error))?;
    Ok(view(daemon, &Found { node, ..found }))
}

async fn list_snapshots(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let volume = match params.text_opt("volume")? {
        Some(name) => Some(daemon.volume_of("volume", name, params.text_opt("pool")?).await?.node.uuid),
        None => None,
    };
    list(daemon, params, |node| {
        node.kind == NodeKind::Snapshot && (volume.is_none() || node.volume_uuid == volume)
    })
    .await
}

async fn diff(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let to = daemon.node("to", params.text("to")?).await?;
    let from = match params.text_opt("from")? {
        Some(from) => Some(daemon.node("from", from).await?),
        None => None,
    };
    if let Some(from) = from.as_ref().filter(|from| from.pool.uuid() != to.pool.uuid()) {
        let reason = format!("is in pool {}, not {}", to.pool.name(), from.pool.name());
        return Err(RpcError::field("to", reason));
    }
    let (offset, max) = diff_limits(params)?;
    let from = from.map(|from| from.id());
    let part = to.pool.diff_part(from.as_deref(), &to.id(), offset, max).await.map_err(pool_error)?;
    Ok(diff_answer(&part))
}

/// Where a part begins and how many ranges it may have.
pub fn diff_limits(params: &Params) -> Result<(u64, usize), RpcError> {
    let offset = params.u64_opt("offset")?.unwrap_or(0);
    if !offset.is_multiple_of(4096) {
        return Err(RpcError::field("offset", "must be a multiple of 4096"));
    }
    Ok((offset, params.u64_opt("max_ranges")?.map_or(RANGES_DEFAULT, |max| max as usize)))
}

/// A part of a difference as it is answered.
pub fn diff_answer(part: &DiffPart) -> Value {
    let ranges = part.ranges.iter().map(|range| {
        let kind = match range.kind {
            RangeKind::Data => "data",
            RangeKind::Zero => "zero",
        };
        json!({ "offset": range.offset, "length": range.length, "kind": kind })
    });
    json!({
        "ranges": ranges.collect::<Vec<Value>>(),
        "changed_bytes": part.ranges.iter().map(|range| range.length).sum::<u64>(),
        "truncated": part.next_offset.is_some(),
        "next_offset": part.next_offset,
    })
}

async fn clone(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let snapshot = daemon.snapshot("snapshot", params.text("snapshot")?).await?;
    let name = params.text("name")?;
    let made = snapshot.pool.clone_create(&snapshot.id(), name).await;
    let node = made_or_same(&snapshot.pool, name, made, |node| {
        if node.origin == Some(snapshot.node.uuid) {
            return Ok(());
        }
        let text = format!("{name} exists already, and is not a clone of {}", snapshot.node.name);
        Err(RpcError::refused(libc::EEXIST, text).with("field", "name"))
    });
    let node = node.await?;
    Ok(view(daemon, &Found { node, ..snapshot }))
}
