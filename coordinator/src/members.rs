//! The service of members: what admins ask about who belongs to the cluster. Wire types end here.

use crate::{
    audit::Audit,
    reception::Update,
    registry::{Registry, RegistryError, ledger::Terms},
    session::Session,
};
use galaxy_common::DeviceName;
use galaxy_proto::{
    door::require,
    fault::{Fault, to_status},
    identity::Role,
    join::local_addresses,
    v1::{self, members_server::Members},
};
use serde_json::json;
use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};
use tonic::{Code, Request, Response, Status};

/// The service of members, which only admins reach.
#[derive(Clone)]
pub(crate) struct MemberService {
    pub(crate) registry: Arc<Registry>,
    pub(crate) session: Session,
    pub(crate) audit: Audit,
    pub(crate) update: Update,
    /// The address at which the coordinator listens.
    pub(crate) listen: SocketAddr,
}

impl MemberService {
    /// The addresses at which other machines reach the coordinator.
    fn addresses(&self) -> Vec<String> {
        let port = self.listen.port();
        let at = |ip| SocketAddr::new(ip, port).to_string();
        match self.listen.ip() {
            ip if ip.is_unspecified() => {
                let found = local_addresses().into_iter();
                let found = found.filter(|found| ip.is_ipv6() || found.is_ipv4());
                let found: Vec<String> = found.map(at).collect();
                if found.is_empty() {
                    vec![at(std::net::Ipv4Addr::LOCALHOST.into())]
                } else {
                    found
                }
            }
            ip => vec![at(ip)],
        }
    }
}

#[tonic::async_trait]
impl Members for MemberService {
    async fn invite(
        &self,
        request: Request<v1::InviteRequest>,
    ) -> Result<Response<v1::InviteReply>, Status> {
        let peer = require(Role::Admin, &request)?;
        let v1::InviteRequest { role, uses, seconds, name } = request.into_inner();
        let role: Role = role.parse().map_err(|e| invalid(&e))?;
        let name = match name.as_str() {
            "" => None,
            name => Some(DeviceName::new(name).map_err(|e| invalid(&e))?),
        };
        let details = json!({
            "role": role.to_string(), "uses": uses, "seconds": seconds,
            "name": name.as_ref().map(ToString::to_string),
        });
        let terms = Terms { role, uses, lasts: Duration::from_secs(seconds), name };
        let (registry, by, addresses) = (self.registry.clone(), peer.to_string(), self.addresses());
        let (line, until) = blocking(move || registry.invite(terms, by, addresses)).await?;
        self.audit.record(&peer, "invite", details);
        Ok(Response::new(v1::InviteReply { line: line.text(), until: until.0 }))
    }

    async fn list(
        &self,
        _request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListReply>, Status> {
        let (issued, removed) = self.registry.members();
        let mut members: BTreeMap<String, v1::Member> = BTreeMap::new();
        for (name, role) in issued {
            let (name, role, state) = (name.to_string(), role.to_string(), "joined".to_owned());
            let member = v1::Member { name: name.clone(), role, state, ..v1::Member::default() };
            members.insert(name, member);
        }
        for device in self.session.devices() {
            let member = v1::Member {
                name: device.name.clone(),
                role: Role::Device.to_string(),
                state: device.state.to_owned(),
                address: device.address,
                detail: device.detail,
            };
            members.insert(device.name, member);
        }
        for name in removed {
            let (name, state) = (name.to_string(), "removed".to_owned());
            let member = v1::Member { name: name.clone(), state, ..v1::Member::default() };
            members.insert(name, member);
        }
        Ok(Response::new(v1::ListReply { members: members.into_values().collect() }))
    }

    async fn remove(
        &self,
        request: Request<v1::RemoveRequest>,
    ) -> Result<Response<v1::RemoveReply>, Status> {
        let peer = require(Role::Admin, &request)?;
        let name = DeviceName::new(request.into_inner().name).map_err(|e| invalid(&e))?;
        let (registry, by, of) = (self.registry.clone(), peer.to_string(), name.clone());
        let devices = blocking(move || registry.remove(&of, by)).await?;
        self.audit.record(&peer, "remove", json!({ "removed": name }));
        (self.update)(devices).await;
        Ok(Response::new(v1::RemoveReply {}))
    }
}

fn invalid(error: &dyn std::fmt::Display) -> Status {
    to_status(Code::InvalidArgument, Fault::new("invalid_request", error.to_string(), false))
}

/// Runs `work`, which writes to the disk, where blocking is allowed.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RegistryError> + Send + 'static,
) -> Result<T, Status> {
    let internal = |why: String| to_status(Code::Internal, Fault::new("internal", why, false));
    let done = tokio::task::spawn_blocking(work).await.map_err(|e| internal(e.to_string()))?;
    done.map_err(|error| match error {
        RegistryError::NoAuthority
        | RegistryError::Invite(_)
        | RegistryError::Remove(_)
        | RegistryError::Many => invalid(&error),
        RegistryError::File { .. }
        | RegistryError::Private(_)
        | RegistryError::Ledger { .. }
        | RegistryError::Authority(_)
        | RegistryError::Cluster(_) => internal(error.to_string()),
    })
}
