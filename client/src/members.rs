//! What admins ask of a coordinator: invitations, and who belongs to the cluster.

use crate::{client::Client, error::ClientError};
use galaxy_common::DeviceName;
use galaxy_proto::{identity::Role, v1};
use serde::Serialize;
use std::time::Duration;

/// An invitation, which lets machines join.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Invitation {
    /// The line for `galaxy join`. Whoever has it may join.
    pub line: String,
    /// When it expires, in seconds since 1970.
    pub until: u64,
}

/// A member of a cluster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Member {
    /// The name of the member.
    pub name: String,
    /// The role of the member; empty for one that was removed.
    pub role: String,
    /// The state: that of a device as in a status, else `joined` or `removed`.
    pub state: String,
    /// The address of a device.
    pub address: String,
    /// More about the state, for people.
    pub detail: String,
}

impl Client {
    /// Makes an invitation. Needs the role admin.
    ///
    /// # Errors
    /// `permission_denied`, or `invalid_request` where the coordinator does not let machines join so.
    pub async fn invite(
        &self,
        role: Role,
        uses: u32,
        lasts: Duration,
        name: Option<&DeviceName>,
    ) -> Result<Invitation, ClientError> {
        let name = name.map(ToString::to_string).unwrap_or_default();
        let (role, seconds) = (role.to_string(), lasts.as_secs());
        let request = self.timed(v1::InviteRequest { role, uses, seconds, name });
        let v1::InviteReply { line, until } = self.members().invite(request).await?.into_inner();
        Ok(Invitation { line, until })
    }

    /// Lists all members that the coordinator knows of. Needs the role admin.
    ///
    /// # Errors
    /// `permission_denied`.
    pub async fn list_members(&self) -> Result<Vec<Member>, ClientError> {
        let request = self.timed(v1::ListRequest {});
        let members = self.members().list(request).await?.into_inner().members.into_iter();
        let member = |v1::Member { name, role, state, address, detail }| Member {
            name,
            role,
            state,
            address,
            detail,
        };
        Ok(members.map(member).collect())
    }

    /// Removes a member for good. Needs the role admin.
    ///
    /// # Errors
    /// `permission_denied`, or `invalid_request` where nobody has the name.
    pub async fn remove_member(&self, name: &DeviceName) -> Result<(), ClientError> {
        let request = self.timed(v1::RemoveRequest { name: name.to_string() });
        self.members().remove(request).await?;
        Ok(())
    }
}
