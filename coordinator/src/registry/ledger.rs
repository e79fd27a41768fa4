//! What is known of who belongs to the cluster, as a pure state machine: invitations, identities that were issued by
//! them, and who was removed. It reads no clock and touches no file; [`super::Registry`] does both.

use galaxy_common::DeviceName;
use galaxy_proto::{
    identity::{Moment, Removed, Role},
    join::{
        AskError, Binding, InvitationId, JoinRequest, NoRandomness, PublicKey, Secret, VerifiedJoin,
    },
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, time::Duration};

/// The most invitations at one time.
const MAX_INVITATIONS: usize = 256;
/// The most identities that are issued, and the most members that are removed, in all of a cluster's life.
const MAX_MEMBERS: usize = 16_384;
/// The most uses of one invitation.
pub const MAX_USES: u32 = 256;
/// The longest time that an invitation may hold.
pub const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long an invitation is kept after its end, in seconds, so that a late machine learns why it is refused.
const KEPT_S: u64 = 24 * 3600;
/// A name that directories of keys need for themselves.
const RESERVED: &str = "ca";

/// A permission to join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Invitation {
    #[serde(with = "text")]
    id: InvitationId,
    #[serde(with = "text")]
    secret: Secret,
    #[serde(with = "text")]
    role: Role,
    /// The name that the member gets; none if it may choose.
    name: Option<DeviceName>,
    /// How often the invitation may still be used.
    uses: u32,
    /// When the invitation ends, in seconds after 1970.
    until: u64,
    /// The author of the invitation.
    by: String,
}

/// An identity that an invitation gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Issued {
    name: DeviceName,
    #[serde(with = "text")]
    role: Role,
    #[serde(with = "text")]
    key: Key,
    #[serde(with = "text")]
    invitation: InvitationId,
    at: u64,
}

/// A member that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RemovedMember {
    name: DeviceName,
    #[serde(with = "optional")]
    key: Option<Key>,
    by: String,
    at: u64,
}

/// The SHA-256 of a public key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key([u8; 32]);

/// The ledger, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ledger {
    invitations: Vec<Invitation>,
    issued: Vec<Issued>,
    /// The members that were removed. Their number is the version of the list.
    removed: Vec<RemovedMember>,
}

/// The terms of an invitation.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The role of those that join.
    pub role: Role,
    /// How many may join.
    pub uses: u32,
    /// How long the invitation holds.
    pub lasts: Duration,
    /// The name that the member gets; none if it may choose.
    pub name: Option<DeviceName>,
}

/// Why there is no invitation.
#[derive(Debug, thiserror::Error)]
pub enum InviteError {
    /// A coordinator cannot be invited.
    #[error("nobody joins as a coordinator: invite a device, a client or an admin")]
    Coordinator,
    /// The invitation would have too many uses, or none.
    #[error("an invitation has 1 to {MAX_USES} uses, and with a name one, not {uses}")]
    Uses {
        /// How many uses were asked for.
        uses: u32,
    },
    /// The invitation would hold too long, or no time at all.
    #[error("an invitation holds for 1 s to 7 days")]
    Lasts,
    /// The name cannot be given.
    #[error(transparent)]
    Name(#[from] NameDenial),
    /// There are too many invitations already.
    #[error("there are {MAX_INVITATIONS} invitations that hold already: wait until some end")]
    Many,
    /// The system gives no randomness for the secret.
    #[error(transparent)]
    Random(#[from] NoRandomness),
}

/// Why a name cannot be given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameDenial {
    /// The name is taken.
    #[error("the name {0} is taken: choose another, with --name")]
    Taken(DeviceName),
    /// The name is that of a removed member.
    #[error(
        "{0} was removed from the cluster, and its name is not given again: choose another, with --name"
    )]
    Removed(DeviceName),
    /// The name is reserved.
    #[error("the name {0} is not given: choose another, with --name")]
    Reserved(DeviceName),
}

/// Why a machine does not join.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The invitation is not known.
    #[error(
        "the invitation {0} is not known here: was the line copied whole, and is it not too old?"
    )]
    Unknown(InvitationId),
    /// The invitation has ended.
    #[error("the invitation {id} ended on {until}: make another with `galaxy invite`")]
    Expired {
        /// The id of the invitation.
        id: InvitationId,
        /// When the invitation ended.
        until: Moment,
    },
    /// The invitation was used as often as it may be.
    #[error("the invitation {0} has been used: make another with `galaxy invite`")]
    Used(InvitationId),
    /// The request to join is wrong.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The name cannot be given.
    #[error(transparent)]
    Name(#[from] NameDenial),
    /// Neither the invitation nor the machine gives a name.
    #[error("the invitation names nobody: choose a name, with --name")]
    Nameless,
    /// The key has a certificate already.
    #[error("the key has a certificate already: each identity has a key of its own")]
    KnownKey,
    /// The cluster has had as many members as it may have.
    #[error("the cluster has had {MAX_MEMBERS} members already")]
    Many,
}

impl Denial {
    /// The stable name of the reason, in snake case.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unknown(_) => "unknown_invitation",
            Self::Expired { .. } => "expired",
            Self::Used(_) => "used",
            Self::Ask(AskError::Proof) => "wrong_secret",
            Self::Ask(AskError::Request(_)) => "bad_request",
            Self::Ask(AskError::Name(_)) => "bad_name",
            Self::Name(NameDenial::Taken(_)) => "name_taken",
            Self::Name(NameDenial::Removed(_)) => "name_removed",
            Self::Name(NameDenial::Reserved(_)) => "name_reserved",
            Self::Nameless => "no_name",
            Self::KnownKey => "known_key",
            Self::Many => "too_many",
        }
    }
    /// Whether the reason counts as an attempt to guess.
    pub fn guesses(&self) -> bool {
        matches!(self, Self::Unknown(_) | Self::Ask(_) | Self::KnownKey)
    }
}

/// A machine that may join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admitted {
    /// The name of the new member.
    pub name: DeviceName,
    /// The role of the new member.
    pub role: Role,
    /// The public key of the new member.
    pub key: PublicKey,
    /// The secret of the invitation, which the machine knows.
    pub secret: Secret,
}

/// Why nobody is removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemoveError {
    /// Nobody has that name.
    #[error("nobody of this cluster is called {name}; known are {}", known.join(", "))]
    Unknown {
        /// The name that was asked for.
        name: DeviceName,
        /// The names that are known.
        known: Vec<String>,
    },
    /// As many members were removed as may be.
    #[error("{MAX_MEMBERS} members were removed already: make the cluster a new authority")]
    Many,
    /// The coordinator itself is not removed.
    #[error("{0} is the coordinator itself")]
    Coordinator(DeviceName),
}

impl Ledger {
    /// Creates an invitation. `taken` says whether a name has an owner that this ledger does not know.
    ///
    /// # Errors
    /// When its terms are out of bounds, or there are too many.
    pub fn invite(
        &mut self,
        now: Moment,
        terms: Terms,
        by: String,
        taken: impl Fn(&DeviceName) -> bool,
    ) -> Result<(InvitationId, Secret, Moment), InviteError> {
        let Terms { role, uses, lasts, name } = terms;
        if role == Role::Coordinator {
            return Err(InviteError::Coordinator);
        }
        if !(1..=MAX_USES).contains(&uses) || name.is_some() && uses > 1 {
            return Err(InviteError::Uses { uses });
        }
        if lasts < Duration::from_secs(1) || lasts > LONGEST {
            return Err(InviteError::Lasts);
        }
        if let Some(name) = &name {
            self.free(name, taken)?;
        }
        self.invitations.retain(|old| now.0 < old.until.saturating_add(KEPT_S));
        if self.invitations.len() >= MAX_INVITATIONS {
            // Those that hold no more are kept only for the reasons of refusals.
            self.invitations.retain(|old| old.uses > 0 && now.0 < old.until);
        }
        if self.invitations.len() >= MAX_INVITATIONS {
            return Err(InviteError::Many);
        }
        let (id, secret) = (InvitationId::random(role, uses > 1)?, Secret::random()?);
        let until = now.0.saturating_add(lasts.as_secs());
        let invitation = Invitation { id, secret: secret.clone(), role, name, uses, until, by };
        self.invitations.push(invitation);
        Ok((id, secret, Moment(until)))
    }

    /// Decides on a request to join, and takes one use of the invitation if it is granted. What this returns may be
    /// signed only once the ledger is stored.
    ///
    /// # Errors
    /// The reason why the machine does not join. The invitation is not used then.
    pub fn admit(
        &mut self,
        now: Moment,
        ask: &JoinRequest,
        binding: &Binding,
        taken: impl Fn(&DeviceName) -> bool,
    ) -> Result<Admitted, Denial> {
        let at = self.invitations.iter().position(|known| known.id == ask.invitation);
        let at = at.ok_or(Denial::Unknown(ask.invitation))?;
        let Invitation { id, secret, role, name, uses, until, .. } = self.invitations[at].clone();
        let VerifiedJoin { key, wish } = VerifiedJoin::check(ask, &secret, binding)?;
        if now.0 >= until {
            return Err(Denial::Expired { id, until: Moment(until) });
        }
        if uses == 0 {
            return Err(Denial::Used(id));
        }
        let name = name.or(wish).ok_or(Denial::Nameless)?;
        self.free(&name, taken)?;
        let fingerprint = Key(key.fingerprint());
        let gone = self.removed.iter().filter_map(|gone| gone.key);
        if self.issued.iter().map(|issued| issued.key).chain(gone).any(|key| key == fingerprint) {
            return Err(Denial::KnownKey);
        }
        if self.issued.len() >= MAX_MEMBERS {
            return Err(Denial::Many);
        }
        self.invitations[at].uses -= 1;
        let issued =
            Issued { name: name.clone(), role, key: fingerprint, invitation: id, at: now.0 };
        self.issued.push(issued);
        Ok(Admitted { name, role, key, secret })
    }

    /// Notes an identity that is issued on this machine, where the authority is.
    ///
    /// # Errors
    /// When its name cannot be given.
    pub fn enrol(
        &mut self,
        now: Moment,
        (name, role): (&DeviceName, Role),
        key: &PublicKey,
    ) -> Result<(), NameDenial> {
        self.free(name, |_| false)?;
        let (key, invitation) = (Key(key.fingerprint()), InvitationId([0; 8]));
        self.issued.push(Issued { name: name.clone(), role, key, invitation, at: now.0 });
        Ok(())
    }

    /// Whether a name can be given.
    fn free(
        &self,
        name: &DeviceName,
        taken: impl Fn(&DeviceName) -> bool,
    ) -> Result<(), NameDenial> {
        if name.as_str() == RESERVED {
            return Err(NameDenial::Reserved(name.clone()));
        }
        if self.removed.iter().any(|gone| gone.name == *name) {
            return Err(NameDenial::Removed(name.clone()));
        }
        match taken(name) || self.issued.iter().any(|issued| issued.name == *name) {
            true => Err(NameDenial::Taken(name.clone())),
            false => Ok(()),
        }
    }

    /// Removes a member for good; nothing changes if it was removed before. `others` are members that this ledger does
    /// not know.
    ///
    /// # Errors
    /// When there is nobody of that name.
    pub fn remove(
        &mut self,
        now: Moment,
        name: &DeviceName,
        by: String,
        others: &[DeviceName],
    ) -> Result<(), RemoveError> {
        if self.removed.iter().any(|gone| gone.name == *name) {
            return Ok(());
        }
        let issued = self.issued.iter().position(|issued| issued.name == *name);
        if issued.is_none() && !others.contains(name) {
            let names = self.issued.iter().map(|issued| &issued.name).chain(others);
            let known = names.map(ToString::to_string).collect::<BTreeSet<_>>();
            return Err(RemoveError::Unknown {
                name: name.clone(),
                known: known.into_iter().collect(),
            });
        }
        if self.removed.len() >= MAX_MEMBERS {
            return Err(RemoveError::Many);
        }
        let key = issued.map(|at| self.issued.remove(at).key);
        self.removed.push(RemovedMember { name: name.clone(), key, by, at: now.0 });
        Ok(())
    }

    /// The list of removed members, by which doors and dials refuse them.
    pub fn removed(&self) -> Removed {
        Removed {
            version: self.removed.len() as u64,
            names: self.removed.iter().map(|gone| gone.name.clone()).collect(),
            keys: self.removed.iter().filter_map(|gone| Some(gone.key?.0)).collect(),
        }
    }

    /// Issued identities, with their roles.
    pub fn issued(&self) -> impl Iterator<Item = (&DeviceName, Role)> {
        self.issued.iter().map(|issued| (&issued.name, issued.role))
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
impl std::str::FromStr for Key {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "a key is known by 64 digits of base 16";
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        let mut key = [0; 32];
        for (byte, at) in key.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| wrong)?;
        }
        Ok(Self(key))
    }
}

/// Values as texts, where they have no form of their own in JSON.
mod text {
    use super::{InvitationId, Key, Role, Secret};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::{fmt::Display, str::FromStr};

    pub(super) trait Text {
        fn text(&self) -> String;
    }
    impl Text for InvitationId {
        fn text(&self) -> String {
            Self::text(self)
        }
    }
    impl Text for Secret {
        fn text(&self) -> String {
            Self::text(self)
        }
    }
    impl Text for Role {
        fn text(&self) -> String {
            self.to_string()
        }
    }
    impl Text for Key {
        fn text(&self) -> String {
            self.to_string()
        }
    }

    pub(super) fn serialize<S: Serializer>(value: &impl Text, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&value.text())
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>, T>(from: D) -> Result<T, D::Error>
    where
        T: FromStr,
        T::Err: Display,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A key, if one is known.
mod optional {
    use super::Key;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(key: &Option<Key>, to: S) -> Result<S::Ok, S::Error> {
        key.map(|key| key.to_string()).serialize(to)
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Key>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

#[cfg(test)]
mod tests;
