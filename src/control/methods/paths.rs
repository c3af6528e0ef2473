//! How hosts reach what is here, and where else they may ask: under SPDK's names and in SPDK's shapes.
#![forbid(unsafe_code)]

use super::nvmf::{
    ADDRESS, ANA_STATE, NQN, TGT_NAME, U32, address, address_in, group, left, listen_address, spoken,
};
use crate::control::Daemon;
use crate::control::error::{INTERNAL_ERROR, RpcError};
use crate::control::schema::{Kind, Params, optional, required};
use crate::control::table::{Chapter, Method};
use crate::nvme::nqn::DISCOVERY;
use crate::target::{AnaState, Referral};
use serde_json::{Value, json};
use std::rc::Rc;

/// The chapter of the reference page.
pub const CHAPTER: Chapter = Chapter {
    title: "SPDK: paths and discovery",
    preface: "The state of a path belongs to a listener and an ANA group of a subsystem and comes back with the \
              subsystem; referrals and the addresses of discovery are kept in every pool that is here.",
    methods: &[
        Method {
            name: "nvmf_subsystem_listener_set_ana_state",
            summary: "Changes how a listener reaches the namespaces of an ANA group; hosts that came in by it are told. \
                      Answered when nothing runs any more that the new state forbids.",
            params: &[
                NQN,
                required("listen_address", Kind::Object(ADDRESS), "The listener."),
                required("ana_state", ANA_STATE, "The new state."),
                TGT_NAME,
                optional("anagrpid", U32, "The group; all of them when left out or 0."),
            ],
            result: "`true`; an error when a device holds commands for so long that they were not waited for: hosts are \
                     kept away already, and asking again waits on.",
            run: |daemon, params| {
                Box::pin(async move {
                    let address = listen_address(&params)?;
                    let state = AnaState::from_name(params.text("ana_state")?).unwrap_or_default();
                    let group = group(&params)?;
                    let changing = daemon.exports.lock().await;
                    let leaving = daemon.set_ana_state(params.text("nqn")?, address, group, state).await;
                    drop(changing);
                    left(leaving).await
                })
            },
        },
        Method {
            name: "nvmf_discovery_add_referral",
            summary: "Tells hosts that ask for subsystems of another place to ask.",
            params: &[
                required("address", Kind::Object(ADDRESS), "Where that is."),
                TGT_NAME,
                optional("secure_channel", Kind::Bool, "Whether it is reached by TLS only."),
                optional("subnqn", Kind::Nqn, "What is there; a discovery service when left out."),
            ],
            result: "`true`, also when it was known already.",
            run: |daemon, params| Box::pin(async move { add_referral(&daemon, &params).await }),
        },
        Method {
            name: "nvmf_discovery_remove_referral",
            summary: "Tells hosts of another place no more.",
            params: &[
                required("address", Kind::Object(ADDRESS), "Where that is."),
                TGT_NAME,
                optional("subnqn", Kind::Nqn, "What is there; a discovery service when left out."),
            ],
            result: "`true`.",
            run: |daemon, params| Box::pin(async move { remove_referral(&daemon, &params).await }),
        },
        Method {
            name: "nvmf_discovery_get_referrals",
            summary: "Lists the other places that hosts are told of.",
            params: &[TGT_NAME],
            result: "a list of `{address, secure_channel, subnqn}`.",
            run: |daemon, _| Box::pin(async move { Ok(referrals(&daemon)) }),
        },
    ],
};

fn subnqn(params: &Params) -> Result<&str, RpcError> {
    Ok(params.text_opt("subnqn")?.unwrap_or(DISCOVERY))
}

async fn add_referral(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let referral = Referral {
        addr: address_in(params, "address")?,
        nqn: subnqn(params)?.to_owned(),
        secure_channel: params.bool_opt("secure_channel")?.unwrap_or(false),
    };
    let _changing = daemon.exports.lock().await;
    daemon.add_referral(referral).await.map_err(spoken)?;
    Ok(Value::Bool(true))
}

async fn remove_referral(daemon: &Rc<Daemon>, params: &Params) -> Result<Value, RpcError> {
    let (address, nqn) = (address_in(params, "address")?, subnqn(params)?);
    let _changing = daemon.exports.lock().await;
    match daemon.remove_referral(address, nqn).await.map_err(spoken)? {
        true => Ok(Value::Bool(true)),
        false => {
            let missing =
                RpcError::refused(libc::ENOENT, format!("there is no referral to {nqn} at {address}"));
            Err(missing.with("field", "address").spoken_as(INTERNAL_ERROR, "Internal error"))
        }
    }
}

fn referrals(daemon: &Daemon) -> Value {
    let all = daemon.target.referrals();
    let view = all.iter().map(|referral| {
        json!({
            "address": address(referral.addr),
            "secure_channel": referral.secure_channel,
            "subnqn": referral.nqn,
        })
    });
    view.collect()
}
